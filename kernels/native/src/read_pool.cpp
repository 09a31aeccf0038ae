#include "read_pool.h"

#include "crc32.h"

#include <cerrno>
#include <chrono>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unistd.h>

namespace aegis {

namespace {

ssize_t read_pieces(int fd, const iovec* pieces, int count, off_t offset) {
#ifdef __APPLE__
    // preadv came with macOS 11; the caller's loop takes one piece after the other just as well.
    (void)count;
    return pread(fd, pieces[0].iov_base, pieces[0].iov_len, offset);
#else
    return preadv(fd, pieces, count, offset);
#endif
}

}  // namespace

ReadPool::ReadPool(int threads, bool drop_cache, ReadCall read)
    : drop_cache_(drop_cache), read_(read == nullptr ? read_pieces : read) {
    if (threads < 1) {
        throw std::invalid_argument("a read pool of " + std::to_string(threads) +
                                    " threads was asked for; use at least one");
    }
    // Signals belong to the main thread: readers start with all of them blocked.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        start(threads);
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ReadPool::start(int threads) {
    shared_->threads.reserve(static_cast<std::size_t>(threads));
    try {
        for (int i = 0; i < threads; ++i) shared_->threads.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
        if (shared_->threads.empty()) throw;
    }
}

ReadPool::~ReadPool() { close(); }

std::unique_lock<std::mutex> ReadPool::lock() {
    if (!shared_.here()) {
        throw std::runtime_error("the read pool was opened by another process, which forked this one");
    }
    return std::unique_lock(shared_->mutex);
}

ReadPool::Ticket ReadPool::submit(int fd, std::int64_t offset, std::int64_t nbytes,
                                  const std::vector<std::uintptr_t>& addresses, bool demand,
                                  const std::vector<std::int64_t>& checksums) {
    if (!checksums.empty() && checksums.size() != addresses.size()) {
        throw std::invalid_argument(std::to_string(checksums.size()) + " checksums for " +
                                    std::to_string(addresses.size()) + " pieces; give one for each");
    }
    std::vector<iovec> pieces;
    pieces.reserve(addresses.size());
    for (std::uintptr_t address : addresses) {
        pieces.push_back({reinterpret_cast<void*>(address), static_cast<std::size_t>(nbytes)});
    }
    Ticket ticket;
    {
        const auto locked = lock();
        if (closed_) throw std::runtime_error("the read pool is closed");
        ticket = next_++;
        jobs_.emplace(ticket, Job{fd, offset, nbytes, std::move(pieces), checksums, demand, false, false, 0});
        (demand ? demands_ : guesses_).push_back(ticket);
        ++pending_;
    }
    shared_->work.notify_one();
    return ticket;
}

bool ReadPool::promote(Ticket ticket) {
    const auto locked = lock();
    auto found = jobs_.find(ticket);
    if (found == jobs_.end() || found->second.started || found->second.demand) return false;
    // Its entry among the guesses stays behind and is skipped: the job has begun by then.
    found->second.demand = true;
    demands_.push_back(ticket);
    return true;
}

bool ReadPool::cancel(Ticket ticket) {
    const auto locked = lock();
    auto found = jobs_.find(ticket);
    if (found == jobs_.end() || found->second.started) return false;
    jobs_.erase(found);
    --pending_;
    return true;
}

ReadPool::Job& ReadPool::find(Ticket ticket) {
    auto found = jobs_.find(ticket);
    if (found == jobs_.end()) throw UnknownTicket(std::to_string(ticket));
    return found->second;
}

bool ReadPool::done(Ticket ticket) {
    const auto locked = lock();
    return find(ticket).ended;
}

void ReadPool::collect(const std::vector<Ticket>& tickets, std::vector<Ticket>& ended) {
    for (Ticket ticket : tickets) {
        if (find(ticket).ended) ended.push_back(ticket);
    }
}

void ReadPool::poll(const std::vector<Ticket>& tickets, std::vector<Ticket>& ended, int timeout_ms) {
    auto locked = lock();
    collect(tickets, ended);
    if (!ended.empty() || timeout_ms == 0) return;
    shared_->ended.wait_for(locked, std::chrono::milliseconds(timeout_ms), [&] {
        collect(tickets, ended);
        return !ended.empty();
    });
}

ReadPool::Job& ReadPool::find_ended(Ticket ticket) {
    Job& job = find(ticket);
    if (!job.ended) {
        throw std::runtime_error("read " + std::to_string(ticket) + " has not ended; wait for it first");
    }
    return job;
}

std::vector<int> ReadPool::damaged(Ticket ticket) {
    const auto locked = lock();
    const std::vector<std::int64_t>& checksums = find_ended(ticket).checksums;
    std::vector<int> found;
    for (std::size_t i = 0; i < checksums.size(); ++i) {
        if (checksums[i] == kDamaged) found.push_back(static_cast<int>(i));
    }
    return found;
}

std::int64_t ReadPool::result(Ticket ticket) {
    const auto locked = lock();
    const std::int64_t result = find_ended(ticket).result;
    jobs_.erase(ticket);
    return result;
}

std::int64_t ReadPool::depth() {
    const auto locked = lock();
    return pending_;
}

double ReadPool::busy_s() {
    const auto locked = lock();
    const Clock::duration now = reading_ > 0 ? Clock::now() - began_ : Clock::duration{0};
    return std::chrono::duration<double>(busy_ + now).count();
}

void ReadPool::close() {
    if (!shared_.here()) return;
    {
        const auto locked = lock();
        closed_ = true;
        for (auto& [ticket, job] : jobs_) {
            if (job.started) continue;
            job.started = job.ended = true;
            job.result = -ECANCELED;
            --pending_;
        }
    }
    shared_->work.notify_all();
    shared_->ended.notify_all();
    for (auto& thread : shared_->threads) thread.join();
    shared_->threads.clear();
}

ReadPool::Job* ReadPool::next(std::deque<Ticket>& queue) {
    while (!queue.empty()) {
        auto found = jobs_.find(queue.front());
        queue.pop_front();
        if (found != jobs_.end() && !found->second.started) return &found->second;
    }
    return nullptr;
}

void ReadPool::serve() {
    auto locked = lock();
    for (;;) {
        Job* job = next(demands_);
        if (job == nullptr) job = next(guesses_);
        if (job == nullptr) {
            if (closed_) return;
            shared_->work.wait(locked);
            continue;
        }
        job->started = true;
        if (reading_++ == 0) began_ = Clock::now();
        locked.unlock();
        const std::int64_t result = perform(*job);
        locked.lock();
        if (--reading_ == 0) busy_ += Clock::now() - began_;
        job->result = result;
        job->ended = true;
        if (result > 0) read_nbytes_.fetch_add(result, std::memory_order_relaxed);
        --pending_;
        shared_->ended.notify_all();
    }
}

std::int64_t ReadPool::perform(Job& job) const {
    // Ours alone while the read runs. Readers never allocate: each would get a heap of its own.
    std::vector<iovec>& pieces = job.pieces;
    std::size_t first = 0;
    std::int64_t got = 0;
    while (first < pieces.size()) {
        const int left = static_cast<int>(pieces.size() - first);
        const ssize_t count = read_(job.fd, &pieces[first], left, job.offset + got);
        if (count > 0) {
            got += count;
            std::size_t rest = static_cast<std::size_t>(count);
            while (first < pieces.size() && rest >= pieces[first].iov_len) {
                rest -= pieces[first++].iov_len;
            }
            if (rest > 0) {
                pieces[first].iov_base = static_cast<char*>(pieces[first].iov_base) + rest;
                pieces[first].iov_len -= rest;
            }
        } else if (count == 0) {
            break;
        } else if (errno == EINVAL && got > 0) {
            break;  // after the unaligned end of a file a direct read fails instead of saying 0
        } else if (errno != EINTR) {
            return -errno;
        }
    }
#ifdef POSIX_FADV_DONTNEED
    if (drop_cache_ && got > 0) posix_fadvise(job.fd, job.offset, got, POSIX_FADV_DONTNEED);
#endif
    check(job, got);
    return got;
}

void ReadPool::check(Job& job, std::int64_t got) {
    const std::int64_t arrived = job.nbytes > 0 ? got / job.nbytes : 0;
    for (std::size_t i = 0; i < job.checksums.size(); ++i) {
        if (job.checksums[i] == kUnchecked || static_cast<std::int64_t>(i) >= arrived) continue;
        // A read that went on after a short one has moved the start, never the end.
        const auto* end = static_cast<const unsigned char*>(job.pieces[i].iov_base) + job.pieces[i].iov_len;
        if (crc32(end - job.nbytes, static_cast<std::size_t>(job.nbytes)) != job.checksums[i]) {
            job.checksums[i] = kDamaged;
        }
    }
}

}  // namespace aegis
