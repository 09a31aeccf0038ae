#include "attention_impl.h"
#include "delta_impl.h"
#include "linear_impl.h"

namespace aegis {

const KernelTable& table_scalar() {
  static const KernelTable table = [] {
    KernelTable t = scalar::make_table("scalar");
    t.attention = scalar::attention_table();
    t.delta = scalar::delta_table();
    return t;
  }();
  return table;
}

}  // namespace aegis
