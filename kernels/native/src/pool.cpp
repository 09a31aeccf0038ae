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
constexpr uint64_t kOpen = uint64_t{1} << 31;

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

// The next piece of this thread's phase; false when none is left. Phase and item are one word, so a
// thread that was interrupted here cannot claim from a later phase.
bool Team::claim(int64_t n, int64_t chunk, int64_t& begin, int64_t& end) {
    uint64_t word = state_->claim.load(std::memory_order_acquire);
    for (;;) {
        begin = static_cast<uint32_t>(word);
        if (static_cast<uint32_t>(word >> 32) != phase_ || begin >= n) return false;
        const int64_t share = (n - begin) / (2 * size);
        end = begin + (share > chunk ? share : chunk);
        if (end > n) end = n;
        const uint64_t claimed = word + static_cast<uint64_t>(end - begin);
        if (state_->claim.compare_exchange_weak(word, claimed, std::memory_order_acq_rel, std::memory_order_acquire))
            return true;
    }
}

void Team::finish(int64_t count, int64_t n) {
    if (state_->done.fetch_add(count, std::memory_order_acq_rel) + count != n) return;
    state_->done.store(0, std::memory_order_relaxed);
    state_->claim.store(static_cast<uint64_t>(phase_ + 1) << 32, std::memory_order_release);
}

void Team::wait() {
    const auto over = [this] {
        return static_cast<uint32_t>(state_->claim.load(std::memory_order_acquire) >> 32) != phase_;
    };
    spin_until(over, false);
    ++phase_;
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
    const uint32_t seen = static_cast<uint32_t>(gate_.load() >> 32);
    for (int index = 1; index < threads_; ++index) workers_.emplace_back([this, seen] { work(seen); });
}

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
}

bool Pool::open_after(uint32_t seen) const {
    const uint64_t gate = gate_.load();
    return (gate & kOpen) && static_cast<uint32_t>(gate >> 32) != seen;
}

void Pool::wait_for_work(uint32_t seen) {
    const auto ready = [&] { return stopping_.load() || open_after(seen); };
    if (spin_until(ready, true)) return;
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, ready);
    sleeping_.fetch_sub(1);
}

// A worker counts itself in before it looks at the body, and only while the gate is open: the body
// lives in the caller's frame.
void Pool::work(uint32_t seen) {
    for (;;) {
        wait_for_work(seen);
        if (stopping_) return;
        uint64_t gate = gate_.load();
        if (!(gate & kOpen) || !gate_.compare_exchange_strong(gate, gate + 1)) continue;
        seen = static_cast<uint32_t>(gate >> 32);
        Team team(threads_, &state_, first_phase_);
        body_(arg_, team);
        gate_.fetch_sub(1);
    }
}

void Pool::dispatch(Body body, const void* arg) {
    std::lock_guard<std::mutex> lock(dispatch_mutex_);
    if (threads_ == 1) {
        Team team(1, nullptr, 0);
        body(arg, team);
        return;
    }
    body_ = body;
    arg_ = arg;
    first_phase_ = static_cast<uint32_t>(state_.claim.load() >> 32);
    gate_.store(((gate_.load() >> 32) + 1) << 32 | kOpen);
    if (sleeping_.load() > 0) {
        { std::lock_guard<std::mutex> sleep_lock(sleep_mutex_); }
        wake_.notify_all();
    }
    Team team(threads_, &state_, first_phase_);
    body(arg, team);
    gate_.fetch_and(~kOpen);
    const auto left = [this] { return (gate_.load() & (kOpen - 1)) == 0; };
    spin_until(left, false);
}

}  // namespace aegis
