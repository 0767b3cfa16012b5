/* The changes to the scheduling tables, each made as a whole or not at all.
 *
 * A worker can be killed between any two instructions, also while it holds the mutex. So a holder
 * decides first, changing nothing, writes what is to be stored into the journal, and then has it
 * stored. Whoever locks the mutex after a death stores it again: each value is the one from after
 * the change, so doing it twice does no harm.
 */
#ifndef HX_JOURNAL_H
#define HX_JOURNAL_H

#include "hx_layout.h"

struct hx_arena;

/* Make a change: write it into the journal and store it. change is borrowed. Called under the
 * mutex. */
void hx_journal_commit(struct hx_arena *arena, enum hx_change_kind kind,
                       const struct hx_change *change);

/* Finish the change that a dead holder of the mutex has begun, if there is one. Called under the
 * mutex. */
void hx_journal_replay(struct hx_arena *arena);

#endif
