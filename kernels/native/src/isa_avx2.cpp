#include "attention_impl.h"
#include "delta_impl.h"
#include "linear_impl.h"

namespace aegis {

const KernelTable& table_avx2() {
  static const KernelTable table = [] {
    KernelTable t = avx2::make_table("avx2");
    t.attention = avx2::attention_table();
    t.delta = avx2::delta_table();
    return t;
  }();
  return table;
}

}  // namespace aegis
