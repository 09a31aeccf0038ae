// Prints a digest for each of many cases of each kernel: the same lines on every instruction set, for
// any number of threads and in any floating-point environment of the caller.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "digest.h"
#include "kernel_table.h"

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "teach Foreign this processor's floating-point control register"
#endif

namespace digest {

Settings settings;

namespace {

struct Named {
  const char* name;
  uint64_t control;
};

#if defined(__x86_64__)
uint64_t read_control() { return __builtin_ia32_stmxcsr(); }
void write_control(uint64_t control) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(control)); }
// FTZ and DAZ; the three roundings; traps of every kind but "inexact".
constexpr Named kEnvironments[] = {{"default", 0x1F80}, {"flush", 0x9FC0}, {"down", 0x3F80},
                                   {"up", 0x5F80},      {"zero", 0x7F80},  {"traps", 0x1000}};
#else
uint64_t read_control() {
  uint64_t control;
  __asm__ __volatile__("mrs %0, fpcr" : "=r"(control));
  return control;
}
void write_control(uint64_t control) { __asm__ __volatile__("msr fpcr, %0" ::"r"(control)); }
// FZ, FZ16 and DN; the three roundings; the other half precision. Traps are optional on Arm.
constexpr Named kEnvironments[] = {{"default", 0},      {"flush", 0x3080000}, {"down", 0x800000},
                                   {"up", 0x400000},    {"zero", 0xC00000},   {"traps", 0x1F00},
                                   {"half", 0x4000000}};
#endif

}  // namespace

bool Foreign::known(const std::string& name) {
  for (const Named& each : kEnvironments)
    if (name == each.name) return true;
  return false;
}

Foreign::Foreign() : before_(read_control()) {
  for (const Named& each : kEnvironments)
    if (settings.environment == each.name) write_control(each.control);
}

Foreign::~Foreign() { write_control(before_); }

void report(const std::string& name, const Digest& digest) {
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(digest.value()));
}

void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

}  // namespace digest

int main(int argc, char** argv) {
  using namespace digest;
  if (argc == 2 && std::string(argv[1]) == "list") {
    for (int n = 0; aegis::available_isa(n); ++n) std::printf("%s\n", aegis::available_isa(n));
    return 0;
  }
  if (argc != 4 || !Foreign::known(argv[3])) fail("usage: aegis_digests list | ISA THREADS ENVIRONMENT");
  if (!aegis::select_isa(argv[1])) fail(std::string(argv[1]) + " is not available here");
  settings.threads = std::atoi(argv[2]);
  settings.environment = argv[3];
  const auto make_pool = [] {
    const Foreign environment;  // workers begin with what their maker has
    return std::make_unique<aegis::Pool>(settings.threads, settings.threads);
  };
  const auto pool = make_pool();
  linear_cases(*pool);
  vector_cases();
  table_cases();
  attention_cases(*pool);
  delta_cases(*pool);
  mlp_cases(*pool);
  router_cases(*pool);
  experts_cases(*pool);
  crc_cases();
  return 0;
}
