#include "attention_impl.h"
#include "delta_impl.h"
#include "linear_impl.h"

namespace aegis {

const KernelTable& table_avx512() {
  static const KernelTable table = [] {
    KernelTable t = avx512::make_table("avx512");
    t.attention = avx512::attention_table();
    t.delta = avx512::delta_table();
    return t;
  }();
  return table;
}

}  // namespace aegis
