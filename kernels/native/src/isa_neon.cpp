#include "attention_impl.h"
#include "delta_impl.h"
#include "linear_impl.h"

namespace aegis {

const KernelTable& table_neon() {
  static const KernelTable table = [] {
    KernelTable t = neon::make_table("neon");
    t.attention = neon::attention_table();
    t.delta = neon::delta_table();
    return t;
  }();
  return table;
}

}  // namespace aegis
