// Reader threads with two queues: demand before guess. The Python twin is tiers/read_pool.py.
#pragma once

#include "of_process.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <sys/uio.h>
#include <unordered_map>
#include <vector>

namespace aegis {

// No read has this ticket, or its result was taken.
struct UnknownTicket : std::out_of_range {
    using std::out_of_range::out_of_range;
};

class ReadPool {
  public:
    using Ticket = std::int64_t;
    static constexpr std::int64_t kUnchecked = -1;
    // As preadv. Tests bring one that fails.
    using ReadCall = ssize_t (*)(int fd, const iovec* pieces, int count, off_t offset);

    // Fewer threads where the system gives no more; an error where it gives none at all.
    ReadPool(int threads, bool drop_cache, ReadCall read = nullptr);
    ~ReadPool();
    ReadPool(const ReadPool&) = delete;
    ReadPool& operator=(const ReadPool&) = delete;

    // Reads pieces of `nbytes` that follow each other in the file, one to each address. Checksums:
    // the CRC-32 that each piece must have, or kUnchecked; empty checks none.
    Ticket submit(int fd, std::int64_t offset, std::int64_t nbytes,
                  const std::vector<std::uintptr_t>& addresses, bool demand,
                  const std::vector<std::int64_t>& checksums);
    bool promote(Ticket ticket);
    bool cancel(Ticket ticket);
    bool done(Ticket ticket);
    // Appends those of `tickets` that have ended to `ended`; waits up to `timeout_ms` for the first.
    void poll(const std::vector<Ticket>& tickets, std::vector<Ticket>& ended, int timeout_ms);
    // Indices of the pieces of a read that has ended whose checksums are wrong.
    std::vector<int> damaged(Ticket ticket);
    std::int64_t result(Ticket ticket);
    std::int64_t read_nbytes() const { return read_nbytes_.load(std::memory_order_relaxed); }
    std::int64_t depth();
    // Seconds since open in which at least one read was under way, its checksums included.
    double busy_s();
    // In a forked child this leaves everything as it is; all other calls refuse to work there.
    void close();

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::int64_t kDamaged = -2;

    struct Job {
        int fd;
        std::int64_t offset, nbytes;
        std::vector<iovec> pieces;
        std::vector<std::int64_t> checksums;  // kDamaged takes the place of one that was wrong
        bool demand, started, ended;
        std::int64_t result;
    };

    struct Shared {
        std::mutex mutex;
        std::condition_variable work, ended;
        std::vector<std::thread> threads;
    };

    std::unique_lock<std::mutex> lock();
    void start(int threads);
    Job& find(Ticket ticket);
    Job& find_ended(Ticket ticket);
    Job* next(std::deque<Ticket>& queue);
    void collect(const std::vector<Ticket>& tickets, std::vector<Ticket>& ended);
    void serve();
    std::int64_t perform(Job& job) const;
    static void check(Job& job, std::int64_t got);

    const OfProcess<Shared> shared_;
    // Nodes of an unordered_map stay where they are, so a reader may keep a Job* without the lock.
    std::unordered_map<Ticket, Job> jobs_;
    std::deque<Ticket> demands_, guesses_;
    Ticket next_ = 1;
    std::int64_t pending_ = 0;
    int reading_ = 0;           // threads that are inside of a read
    Clock::time_point began_;   // the first of these
    Clock::duration busy_{0};   // before that
    bool closed_ = false;
    const bool drop_cache_;
    const ReadCall read_;
    std::atomic<std::int64_t> read_nbytes_{0};
};

}  // namespace aegis
