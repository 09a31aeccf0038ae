#include "pool.h"

#include <chrono>

#if defined(__linux__)
#include <sched.h>
#endif

namespace aegis {

namespace {

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#else
    std::this_thread::yield();
#endif
}

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerLook = 64;
constexpr int kPausesBeforeYield = 512;

// Spins until ready() or, if a limit is given, until it has passed. Past the first microseconds it
// gives the processor away between looks: whoever it waits for may need it.
template <class Ready>
bool spin_until(Ready&& ready, bool limited) {
    const auto start = std::chrono::steady_clock::now();
    for (int pauses = 1; !ready(); ++pauses) {
        relax();
        if (pauses % kPausesPerLook != 0) continue;
        if (limited && std::chrono::steady_clock::now() - start > kSpin) return ready();
        if (pauses >= kPausesBeforeYield) std::this_thread::yield();
    }
    return true;
}

}  // namespace

int usable_processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        int count = CPU_COUNT(&set);
        if (count > 0) return count;
    }
#endif
    int count = static_cast<int>(std::thread::hardware_concurrency());
    return count > 0 ? count : 1;
}

void Team::barrier() {
    if (size == 1) return;
    const uint32_t generation = state_->generation.load(std::memory_order_acquire);
    if (state_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
        state_->arrived.store(0, std::memory_order_relaxed);
        state_->next.store(0, std::memory_order_relaxed);
        state_->generation.store(generation + 1, std::memory_order_release);
        return;
    }
    auto released = [&] { return state_->generation.load(std::memory_order_acquire) != generation; };
    spin_until(released, false);
}

Pool::Pool(int threads) { start(threads); }

Pool::~Pool() { stop(); }

void Pool::set_threads(int threads) {
    std::lock_guard<std::mutex> lock(dispatch_mutex_);
    stop();
    start(threads);
}

void Pool::start(int threads) {
    const int limit = usable_processors();
    threads_ = threads < 1 ? 1 : (threads > limit ? limit : threads);
    const uint32_t seen = epoch_.load(std::memory_order_relaxed);
    for (int index = 1; index < threads_; ++index) {
        workers_.emplace_back([this, index, seen] {
            uint32_t last = seen;
            while (wait_for_work(last)) {
                ++last;
                work(index);
            }
        });
    }
}

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        stopping_ = true;
        epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
}

bool Pool::wait_for_work(uint32_t seen) {
    auto ready = [&] { return epoch_.load() != seen; };
    if (!spin_until(ready, true)) {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, ready);
        sleeping_.fetch_sub(1);
    }
    return !stopping_;
}

void Pool::work(int index) {
    Team team(index, threads_, &state_);
    body_(arg_, team);
    running_.fetch_sub(1, std::memory_order_release);
}

void Pool::dispatch(Body body, const void* arg) {
    std::lock_guard<std::mutex> lock(dispatch_mutex_);
    Team team(0, threads_, &state_);
    if (threads_ == 1) {
        body(arg, team);
        return;
    }
    body_ = body;
    arg_ = arg;
    state_.next.store(0, std::memory_order_relaxed);
    running_.store(threads_ - 1, std::memory_order_relaxed);
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) {
        { std::lock_guard<std::mutex> sleep_lock(sleep_mutex_); }
        wake_.notify_all();
    }
    body(arg, team);
    auto finished = [&] { return running_.load(std::memory_order_acquire) == 0; };
    spin_until(finished, false);
}

}  // namespace aegis
