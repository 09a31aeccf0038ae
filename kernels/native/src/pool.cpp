#include "pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>

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

namespace {

constexpr uint32_t kPhases = 1 << 24;
constexpr uint64_t kItemMask = (1 << 20) - 1;
constexpr uint64_t kUntouched = kItemMask << 20 | kItemMask;  // the whole share, whatever its size

uint64_t untouched(uint32_t phase) { return uint64_t{phase} << 40 | kUntouched; }

}  // namespace

Team::Range Team::left(int thread, uint64_t word, int64_t items) const {
    if ((word & kUntouched) == kUntouched) return {items * thread / size, items * (thread + 1) / size};
    return {static_cast<int64_t>(word >> 20 & kItemMask), static_cast<int64_t>(word & kItemMask)};
}

// A share of another phase than this thread's means that this thread's phase is over.
bool Team::claim(int64_t items, int64_t chunk, int64_t& begin, int64_t& end) {
    std::atomic<uint64_t>& own = state_->shares[index_].word;
    uint64_t word = own.load(std::memory_order_acquire);
    for (;;) {
        if (word >> 40 != phase_) return false;
        const Range range = left(index_, word, items);
        if (range.begin >= range.end) {
            if (!steal(items, chunk)) return false;
            word = own.load(std::memory_order_acquire);
            continue;
        }
        begin = range.begin;
        end = std::min(range.begin + std::max(chunk, (range.end - range.begin) / 4), range.end);
        const uint64_t rest = uint64_t{phase_} << 40 | static_cast<uint64_t>(end) << 20 | static_cast<uint64_t>(range.end);
        if (own.compare_exchange_weak(word, rest, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
    }
}

// Moves the second half of what another thread has left into this thread's share, which is empty and
// which nobody else writes then: the phase cannot end before these items are done.
bool Team::steal(int64_t items, int64_t chunk) {
    for (int step = 1; step < size; ++step) {
        const int victim = (index_ + step) % size;
        std::atomic<uint64_t>& other = state_->shares[victim].word;
        uint64_t word = other.load(std::memory_order_acquire);
        for (;;) {
            if (word >> 40 != phase_) return false;
            const Range range = left(victim, word, items);
            if (range.begin >= range.end) break;
            const int64_t half = std::max((range.end - range.begin) / 2, chunk);
            const int64_t middle = std::max(range.begin, range.end - half);
            const uint64_t phase = uint64_t{phase_} << 40;
            const uint64_t rest = phase | static_cast<uint64_t>(range.begin) << 20 | static_cast<uint64_t>(middle);
            if (!other.compare_exchange_weak(word, rest, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            const uint64_t mine = phase | static_cast<uint64_t>(middle) << 20 | static_cast<uint64_t>(range.end);
            state_->shares[index_].word.store(mine, std::memory_order_release);
            return true;
        }
    }
    return false;
}

// Whoever finishes the last item opens the next phase.
void Team::finish(int64_t count, int64_t items) {
    if (state_->done.fetch_add(count, std::memory_order_acq_rel) + count != items) return;
    const uint32_t next = (phase_ + 1) % kPhases;
    state_->done.store(0, std::memory_order_relaxed);
    for (Share& share : state_->shares) share.word.store(untouched(next), std::memory_order_relaxed);
    state_->phase.store(next, std::memory_order_release);
}

void Team::wait() {
    const auto over = [this] { return state_->phase.load(std::memory_order_acquire) != phase_; };
    spin_until(over, false);
    phase_ = (phase_ + 1) % kPhases;
}

Pool::Pool(int threads, int limit) { start(threads, limit); }

Pool::~Pool() { stop(); }

// A forked child has no workers to restart; whoever holds the lock may not be there either.
void Pool::set_threads(int threads) {
    if (!shared_.here()) return;
    std::lock_guard<std::mutex> lock(dispatch_mutex_);
    stop();
    start(threads, usable_processors());
}

// Where the system gives fewer threads than were asked for, those must do.
void Pool::start(int threads, int limit) {
    threads_ = threads < 1 ? 1 : (threads > limit ? limit : threads);
    const uint32_t seen = static_cast<uint32_t>(gate_.load() >> 32);
    state_.shares = std::vector<Share>(static_cast<size_t>(threads_));
    for (Share& share : state_.shares) share.word.store(untouched(state_.phase.load()));
    std::vector<std::thread>& workers = shared_->workers;
    workers.reserve(static_cast<size_t>(threads_));
    try {
        for (int index = 1; index < threads_; ++index)
            workers.emplace_back([this, index, seen] { work(index, seen); });
    } catch (const std::system_error&) {
        threads_ = static_cast<int>(workers.size()) + 1;
    }
}

void Pool::stop() {
    if (!shared_.here()) return;
    {
        std::lock_guard<std::mutex> lock(shared_->mutex);
        stopping_ = true;
    }
    shared_->wake.notify_all();
    for (auto& worker : shared_->workers) worker.join();
    shared_->workers.clear();
    stopping_ = false;
}

bool Pool::open_after(uint32_t seen) const {
    const uint64_t gate = gate_.load();
    return (gate & kOpen) && static_cast<uint32_t>(gate >> 32) != seen;
}

void Pool::wait_for_work(uint32_t seen) {
    const auto ready = [&] { return stopping_.load() || open_after(seen); };
    if (spin_until(ready, true)) return;
    std::unique_lock<std::mutex> lock(shared_->mutex);
    sleeping_.fetch_add(1);
    shared_->wake.wait(lock, ready);
    sleeping_.fetch_sub(1);
}

// A worker counts itself in before it looks at the body, and only while the gate is open: the body
// lives in the caller's frame.
void Pool::work(int index, uint32_t seen) {
    const FpEnvironment environment;
    for (;;) {
        wait_for_work(seen);
        if (stopping_) return;
        uint64_t gate = gate_.load();
        if (!(gate & kOpen) || !gate_.compare_exchange_strong(gate, gate + 1)) continue;
        seen = static_cast<uint32_t>(gate >> 32);
        Team team(threads_, index, &state_, first_phase_);
        body_(arg_, team);
        gate_.fetch_sub(1);
    }
}

void Pool::dispatch(Body body, const void* arg) {
    const FpEnvironment environment;
    std::lock_guard<std::mutex> lock(dispatch_mutex_);
    if (threads_ == 1) {
        Team team(1, 0, nullptr, 0);
        body(arg, team);
        return;
    }
    body_ = body;
    arg_ = arg;
    first_phase_ = state_.phase.load();
    gate_.store(((gate_.load() >> 32) + 1) << 32 | kOpen);
    if (sleeping_.load() > 0) {
        { std::lock_guard<std::mutex> sleep_lock(shared_->mutex); }
        shared_->wake.notify_all();
    }
    Team team(threads_, 0, &state_, first_phase_);
    body(arg, team);
    gate_.fetch_and(~kOpen);
    const auto left = [this] { return (gate_.load() & (kOpen - 1)) == 0; };
    spin_until(left, false);
}

}  // namespace aegis
