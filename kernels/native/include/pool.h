// Thread pool: the caller and its workers run one body together ("team"), in phases.
//
// A fused operation is one dispatch of several phases, so a layer costs a few microseconds of
// synchronisation. A phase ends when its items are done, not when all threads have arrived: a worker
// that sleeps, or that the system runs something else on, joins when it can and holds nobody up.
// Workers spin for about 50 us after a dispatch, giving the processor away now and then, then sleep.
#pragma once

#include "of_process.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "fp_environment.h"

namespace aegis {

// What is left of one thread's share of a phase. The word names its phase, so that a thread which
// comes late can tell that the phase is over.
struct alignas(64) Share {
    std::atomic<uint64_t> word{0};  // phase << 40 | begin << 20 | end
};

struct TeamState {
    std::vector<Share> shares;  // one per thread
    alignas(64) std::atomic<uint32_t> phase{0};
    alignas(64) std::atomic<int64_t> done{0};
};

// One thread's view of a dispatch. Any number of the team's threads, the caller always among them,
// run the body, each from its start; phases that are over pass at once. Hence: the same `each` calls
// with the same n in every thread, and writes to shared memory only inside of them.
class Team {
public:
    Team(int size, int index, TeamState* state, uint32_t phase)
        : size(size), index_(index), state_(state), phase_(phase) {}

    const int size;  // threads that may take part

    // Calls f(begin, end) over [0, n) in pieces; returns when all of them are done. Every thread has a
    // share of consecutive items and goes through it in order, since another place in memory is a cold
    // start of 1 to 2 us; one that has nothing left takes half of what another has. Pieces shrink from
    // a quarter of the share down to `chunk`.
    template <class F>
    void each(int64_t n, int64_t chunk, F&& f) {
        if (n <= 0) return;
        if (!state_) {
            f(int64_t{0}, n);
            return;
        }
        const int64_t unit = n / kMaxItems + 1, items = (n + unit - 1) / unit;
        int64_t begin, end;
        while (claim(items, (chunk + unit - 1) / unit, begin, end)) {
            f(begin * unit, end * unit < n ? end * unit : n);
            finish(end - begin, items);
        }
        wait();
    }

private:
    static constexpr int64_t kMaxItems = (1 << 20) - 2;  // what a share's word can count

    struct Range {
        int64_t begin, end;
    };

    bool claim(int64_t items, int64_t chunk, int64_t& begin, int64_t& end);
    bool steal(int64_t items, int64_t chunk);
    Range left(int thread, uint64_t word, int64_t items) const;
    void finish(int64_t count, int64_t items);
    void wait();

    int index_;
    TeamState* state_;
    uint32_t phase_;
};

// Processors this process may use (its affinity mask, where the system has one).
int usable_processors();

// Bodies run in the kernels' own floating-point environment, on the caller's thread and on workers.
class Pool {
public:
    explicit Pool(int threads) : Pool(threads, usable_processors()) {}
    // At most `limit` threads: tests ask for more than there are processors.
    Pool(int threads, int limit);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    // Restarts the workers; never more threads than processors this process may use.
    void set_threads(int threads);

    template <class F>
    void run(const F& body) {
        dispatch([](const void* arg, Team& team) { (*static_cast<const F*>(arg))(team); }, &body);
    }

    // The same body on the calling thread alone, for work too small to share.
    template <class F>
    static void run_inline(const F& body) {
        const FpEnvironment environment;
        Team team(1, 0, nullptr, 0);
        body(team);
    }

private:
    using Body = void (*)(const void*, Team&);

    void dispatch(Body body, const void* arg);
    void work(int index, uint32_t seen);
    bool open_after(uint32_t seen) const;
    void wait_for_work(uint32_t seen);
    void start(int threads, int limit);
    void stop();

    struct Shared {
        std::vector<std::thread> workers;
        std::mutex mutex;
        std::condition_variable wake;
    };

    int threads_ = 1;
    std::mutex dispatch_mutex_;

    Body body_ = nullptr;
    const void* arg_ = nullptr;
    uint32_t first_phase_ = 0;
    TeamState state_;
    alignas(64) std::atomic<uint64_t> gate_{0};  // dispatch << 32 | open << 31 | workers inside
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false};
    const OfProcess<Shared> shared_;
};

}  // namespace aegis
