// The table of functions that attention.h promises, for the instruction set of this unit.
#pragma once

#include "attention_core.h"
#include "norm.h"
#include "router.h"
#include "rows.h"

namespace aegis::AEGIS_ISA {

static inline AttentionTable attention_table() {
  AttentionTable t;
  t.elementwise = elementwise;
  t.rms_norm = rms_norm;
  t.rotary_angles = rotary_angles;
  t.rotate = rotate;
  t.attend = attend;
  t.attend_block = attend_block;
  t.merge_blocks = merge_blocks;
  t.route = route;
  t.best = best;
  t.table_row = table_row;
  return t;
}

}  // namespace aegis::AEGIS_ISA
