#include "faults.h"

namespace pplx::sim {

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::LateRead: return "source read at local completion";
    case Fault::SplitRead: return "source read in pieces";
    case Fault::SplitLanding: return "landed in pieces";
    case Fault::Reordered: return "writes reordered";
    case Fault::Delayed: return "write delayed";
    case Fault::ShardsReordered: return "shards reordered";
    case Fault::Duplicated: return "arrival duplicated";
    case Fault::Replayed: return "stale immediate replayed";
    case Fault::Busy: return "EAGAIN burst";
    case Fault::QueueFull: return "EAGAIN, queue full";
    case Fault::CompletionsHeld: return "completions held back";
    case Fault::CompletionsLost: return "completion queue overran";
    case Fault::FailedWrite: return "write failed";
    case Fault::FailedSomewhere: return "error without a write";
    case Fault::FailedPost: return "post failed";
    case Fault::UnknownRefused: return "initiator unknown, refused";
    case Fault::UnknownDropped: return "initiator unknown, dropped";
    case Fault::UnknownSource: return "immediate of nobody";
    case Fault::Unasked: return "answer to nothing";
    case Fault::Poisoned: return "block poisoned";
    case Fault::Slow: return "rank slow";
    case Fault::Killed: return "rank killed";
    case Fault::Vanished: return "rank vanished";
    case Fault::Left: return "rank left early";
    case Fault::LeftInOrder: return "rank left in order";
    case Fault::CorruptStep: return "header: step";
    case Fault::CorruptGeneration: return "header: generation";
    case Fault::CorruptSource: return "header: source";
    case Fault::CorruptRows: return "header: rows";
    case Fault::CorruptCounts: return "header: counts";
    case Fault::CorruptFlags: return "header: flags";
    case Fault::CorruptPiece: return "header: piece";
    case Fault::CorruptMask: return "header: mask";
    case Fault::StaleWrite: return "write of an old generation";
    case Fault::StaleWord: return "word of an old generation";
    case Fault::WokeTooLate: return "rank woke after reset";
    case Fault::Finished: return "rows finished for replicas";
    case Fault::ReplicaLost: return "replica lost";
    case Fault::Relayed: return "rows relayed";
    case Fault::RelayMoved: return "relay moved";
    case Fault::RelayGrew: return "relay of more sources";
    case Fault::Piece: return "piece arrived";
    case Fault::Credit: return "credit arrived";
    case Fault::CreditReordered: return "credits reordered";
    case Fault::Count: break;
  }
  return "?";
}

}  // namespace pplx::sim
