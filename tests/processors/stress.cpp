// The thread pool and the read pool under more load than an engine gives them. Silent unless a
// promise is broken; a build with -fsanitize=thread finds the races.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "crc32.h"
#include "pool.h"
#include "read_pool.h"

namespace {

using aegis::Pool;
using aegis::ReadPool;
using aegis::Team;

uint32_t random_below(uint32_t n) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33) % n;
}

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// Phases of a dispatch: every item once, and what a phase wrote is seen by the next.
void check_phases(Pool& pool, const std::vector<int64_t>& sizes, int64_t chunk, bool yielding) {
  int64_t most = 0;
  for (int64_t n : sizes) most = n > most ? n : most;
  // Plain ints on purpose: only the pool orders the accesses.
  std::vector<int> count(static_cast<size_t>(most));
  pool.run([&](Team& team) {
    int64_t expected = 0;
    for (int64_t n : sizes) {
      expected += n;
      team.each(n, chunk, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++count[static_cast<size_t>(i)];
        if (yielding) std::this_thread::yield();
      });
      team.each(1, 1, [&](int64_t, int64_t) {
        int64_t done = 0;
        for (int each : count) done += each;
        expect(done == expected, "after a phase of " + std::to_string(n) + " items " +
                                     std::to_string(done) + " of " + std::to_string(expected) +
                                     " were done");
      });
    }
  });
}

void stress_phases(Pool& pool, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::vector<int64_t> sizes;
    const int phases = 1 + static_cast<int>(random_below(12));
    for (int i = 0; i < phases; ++i) {
      constexpr uint32_t most[] = {1, 3, 20, 300};
      sizes.push_back(random_below(most[random_below(4)] + 1));  // none, fewer than threads, many
    }
    check_phases(pool, sizes, 1 + random_below(5), round % 4 == 0);
  }
}

// A phase of more items than a share can count.
void stress_large(Pool& pool) {
  constexpr int64_t n = (3 << 20) + 5;
  std::vector<unsigned char> seen(static_cast<size_t>(n));
  pool.run([&](Team& team) {
    team.each(n, 1000, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
    });
  });
  for (unsigned char each : seen) expect(each == 1, "an item of a large phase was not done once");
}

// Bodies so short that workers come late, to phases and dispatches that are over.
void stress_dispatches(Pool& pool, int rounds) {
  int64_t total = 0;
  for (int round = 0; round < rounds; ++round) {
    int64_t done[3] = {0, 0, 0};
    pool.run([&](Team& team) {
      for (int64_t& each : done)
        team.each(1, 1, [&](int64_t, int64_t) { each += round; });
    });
    total += done[0] + done[1] + done[2];
    if (round % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(150));  // past the spin
  }
  expect(total == 3 * (int64_t{rounds} * (rounds - 1) / 2), "a dispatch was lost");
}

// Several callers of one pool, and one that changes its threads between their dispatches.
void stress_callers(Pool& pool, int rounds) {
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < rounds; ++round)
        pool.run([&](Team& team) {
          team.each(10, 1, [&](int64_t begin, int64_t end) { total += end - begin; });
        });
    });
  for (int round = 0; round < 20; ++round) pool.set_threads(1 + round % 3);
  for (std::thread& caller : callers) caller.join();
  expect(total == int64_t{3} * rounds * 10, "several callers lost items");
}

// Every thread is woken: each holds its item until the others have begun theirs.
void stress_waking(Pool& pool) {
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // all workers sleep now
    std::atomic<int> begun{0};
    pool.run([&](Team& team) {
      team.each(team.size, 1, [&](int64_t begin, int64_t end) {
        begun += static_cast<int>(end - begin);
        const auto start = std::chrono::steady_clock::now();
        while (begun < team.size) {
          expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(60),
                 "a worker was not woken for a minute");
          std::this_thread::yield();
        }
      });
    });
  }
}

constexpr int64_t kRecord = 8192;
constexpr int kRecords = 64;

// A file of records that differ, removed at once; and their checksums.
int make_file(std::vector<int64_t>& checksums) {
  char name[] = "/tmp/aegis-stress-XXXXXX";
  const int fd = mkstemp(name);
  expect(fd >= 0, "no temporary file");
  unlink(name);
  std::vector<unsigned char> record(kRecord);
  for (int i = 0; i < kRecords; ++i) {
    for (unsigned char& byte : record) byte = static_cast<unsigned char>(random_below(256));
    checksums.push_back(aegis::crc32(record.data(), kRecord));
    expect(write(fd, record.data(), kRecord) == kRecord, "the temporary file could not be written");
  }
  return fd;
}

struct Pending {
  ReadPool::Ticket ticket;
  int record, pieces;
  bool demand;
  std::unique_ptr<unsigned char[]> memory;
};

// Submits runs of records in both queues, promotes, cancels and takes results in any order.
void stress_reads(int fd, const std::vector<int64_t>& checksums, int threads, int rounds) {
  ReadPool pool(threads, false);
  std::deque<Pending> pending;
  int64_t taken = 0;
  double busy = 0;
  const auto finish = [&](Pending& read) {
    std::vector<ReadPool::Ticket> ended;
    while (ended.empty()) pool.poll({read.ticket}, ended, 50);
    expect(pool.damaged(read.ticket).empty(), "a good record was found damaged");
    expect(pool.result(read.ticket) == read.pieces * kRecord, "a read came back short");
    for (int piece = 0; piece < read.pieces; ++piece)
      expect(aegis::crc32(read.memory.get() + piece * kRecord, kRecord) ==
                 static_cast<uint32_t>(checksums[static_cast<size_t>(read.record + piece)]),
             "a read brought other bytes");
    taken += read.pieces * kRecord;
  };
  for (int round = 0; round < rounds; ++round) {
    const int pieces = 1 + static_cast<int>(random_below(3));
    const int record = static_cast<int>(random_below(kRecords - 3));
    Pending read{0, record, pieces, random_below(2) == 0,
                 std::make_unique<unsigned char[]>(static_cast<size_t>(pieces * kRecord))};
    std::vector<uintptr_t> addresses;
    std::vector<int64_t> wanted;
    for (int piece = 0; piece < pieces; ++piece) {
      addresses.push_back(reinterpret_cast<uintptr_t>(read.memory.get() + piece * kRecord));
      wanted.push_back(checksums[static_cast<size_t>(record + piece)]);
    }
    read.ticket = pool.submit(fd, record * kRecord, kRecord, addresses, read.demand, wanted);
    pending.push_back(std::move(read));
    const size_t at = random_below(static_cast<uint32_t>(pending.size()));
    if (random_below(3) == 0) pool.promote(pending[at].ticket);
    if (random_below(4) == 0 && pool.cancel(pending[at].ticket))
      pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(at));
    while (pending.size() > 24) {
      finish(pending.front());
      pending.pop_front();
    }
    const double busier = pool.busy_s();
    expect(busier >= busy, "a pool became less busy");
    busy = busier;
  }
  for (size_t left = random_below(12); left < pending.size();) {
    finish(pending.back());
    pending.pop_back();
  }
  expect(pool.read_nbytes() >= taken, "bytes that arrived were not counted");
  pool.close();  // with reads still queued: each has ended, one way or the other
  for (Pending& read : pending) expect(pool.done(read.ticket), "a read outlived its pool");
}

}  // namespace

int main(int argc, char** argv) {
  const int scale = argc > 1 ? std::atoi(argv[1]) : 1;
  for (int threads : {1, 2, 3, 8}) {
    Pool pool(threads, threads);  // eight on two processors: most of them come late
    expect(pool.threads() == threads, "the pool has another number of threads than was allowed");
    stress_phases(pool, 300 * scale);
    stress_dispatches(pool, 1500 * scale);
    stress_waking(pool);
    stress_large(pool);
    stress_callers(pool, 100 * scale);
  }
  std::vector<int64_t> checksums;
  const int fd = make_file(checksums);
  for (int threads : {1, 4}) stress_reads(fd, checksums, threads, 1500 * scale);
  close(fd);
  std::puts("ok");
  return 0;
}
