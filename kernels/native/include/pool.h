// Thread pool: the caller and its workers run one body together ("team"), in phases.
//
// A fused operation is one dispatch of several phases, so a layer costs a few microseconds of
// synchronisation. A phase ends when its items are done, not when all threads have arrived: a worker
// that sleeps, or that the system runs something else on, joins when it can and holds nobody up.
// Workers spin for about 50 us after a dispatch, giving the processor away now and then, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace aegis {

struct TeamState {
    alignas(64) std::atomic<uint64_t> claim{0};  // phase << 32 | next item
    alignas(64) std::atomic<int64_t> done{0};
};

// One thread's view of a dispatch. Any number of the team's threads, the caller always among them,
// run the body, each from its start; phases that are over pass at once. Hence: the same `each` calls
// with the same n in every thread, and writes to shared memory only inside of them.
class Team {
public:
    Team(int size, TeamState* state, uint32_t phase) : size(size), state_(state), phase_(phase) {}

    const int size;  // threads that may take part

    // Calls f(begin, end) over [0, n) in pieces claimed by whoever is free; returns when all of them
    // are done. Pieces shrink from a share of what is left down to `chunk`: the start of every piece
    // is a fresh stream from memory, the last ones balance the team.
    template <class F>
    void each(int64_t n, int64_t chunk, F&& f) {
        if (n <= 0) return;
        if (!state_) {
            f(int64_t{0}, n);
            return;
        }
        int64_t begin, end;
        while (claim(n, chunk, begin, end)) {
            f(begin, end);
            finish(end - begin, n);
        }
        wait();
    }

private:
    bool claim(int64_t n, int64_t chunk, int64_t& begin, int64_t& end);
    void finish(int64_t count, int64_t n);
    void wait();

    TeamState* state_;
    uint32_t phase_;
};

class Pool {
public:
    explicit Pool(int threads);
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
        Team team(1, nullptr, 0);
        body(team);
    }

private:
    using Body = void (*)(const void*, Team&);

    void dispatch(Body body, const void* arg);
    void work(uint32_t seen);
    bool open_after(uint32_t seen) const;
    void wait_for_work(uint32_t seen);
    void start(int threads);
    void stop();

    int threads_ = 1;
    std::vector<std::thread> workers_;
    std::mutex dispatch_mutex_;

    Body body_ = nullptr;
    const void* arg_ = nullptr;
    uint32_t first_phase_ = 0;
    TeamState state_;
    alignas(64) std::atomic<uint64_t> gate_{0};  // dispatch << 32 | open << 31 | workers inside
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false};
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
};

// Processors this process may use (its affinity mask, where the system has one).
int usable_processors();

}  // namespace aegis
