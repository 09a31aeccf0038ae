// Thread pool: the caller and its workers run one body together ("team"), with barriers inside it.
//
// A fused operation is one dispatch whose phases are separated by barriers, so a layer costs a few
// microseconds of synchronisation. Workers spin for about 50 us after a dispatch, giving the
// processor away now and then, and then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace aegis {

struct TeamState {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
};

// One thread's view of a dispatch. Every thread of the team must reach the same barriers.
class Team {
public:
    Team(int index, int size, TeamState* state) : index(index), size(size), state_(state) {}

    const int index;
    const int size;

    // Waits for the whole team; also rewinds the counter of `each`.
    void barrier();

    // Calls f(begin, end) over [0, n) in pieces of `chunk`, claimed by whoever is free; then a barrier.
    template <class F>
    void each(int64_t n, int64_t chunk, F&& f) {
        if (size == 1) {
            if (n > 0) f(int64_t{0}, n);
            return;
        }
        for (;;) {
            int64_t begin = state_->next.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= n) break;
            f(begin, begin + chunk < n ? begin + chunk : n);
        }
        barrier();
    }

private:
    TeamState* state_;
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
        Team team(0, 1, nullptr);
        body(team);
    }

private:
    using Body = void (*)(const void*, Team&);

    void dispatch(Body body, const void* arg);
    void work(int index);
    bool wait_for_work(uint32_t seen);
    void start(int threads);
    void stop();

    int threads_ = 1;
    std::vector<std::thread> workers_;
    std::mutex dispatch_mutex_;

    Body body_ = nullptr;
    const void* arg_ = nullptr;
    bool stopping_ = false;
    TeamState state_;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
};

// Processors this process may use (its affinity mask, where the system has one).
int usable_processors();

}  // namespace aegis
