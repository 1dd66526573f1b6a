// Takes one rank through one step: the four production phases in turn and the experts between them, and compares every output with
// the expected one.
#pragma once

#include <memory>
#include <vector>

#include "../../src/cpu/exchange.h"
#include "faults.h"
#include "script.h"

namespace pplx::sim {

class Walker {
 public:
  // `plan`: that of the step before, if this step has the same routing.
  Walker(cpu::Exchange& exchange, std::shared_ptr<Step> step, std::shared_ptr<const Plan> plan, Totals& totals);

  enum class Progress { None, Some, Closed };
  Progress advance();                        // begins the next phase, or polls the current one
  bool has_sent() const { return stage_ > 0; }
  // AllToAll in pieces: true if `earlier`, a step before this one, has begun the receive half that this one would begin next.
  bool in_order_after(const Walker& earlier) const {
    const bool receives = !run_ && (stage_ == 1 || stage_ == 3);
    return !receives || earlier.stage_ > stage_ || (earlier.stage_ == stage_ && earlier.run_);
  }
  std::uint32_t number() const { return number_; }    // the step's own number, once it is sent
  Phase phase() const { return phase_; }
  cpu::Waiting waiting() const { return run_ ? run_->waiting() : cpu::Waiting(); }
  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  const std::shared_ptr<Step>& step() const { return step_; }

 private:
  void begin();
  void finish();
  void begin_dispatch_send();
  void begin_dispatch_recv();
  void begin_combine_send();
  void begin_combine_recv();
  void poison_tokens();
  void poison_expert_outputs();
  void check_dispatch() const;
  void check_row(std::uint64_t row, std::uint64_t expert, const Choice& choice) const;
  void run_experts();
  void attach_tail();
  void check_tail() const;
  void check_combine() const;
  void poison_slots(Op op);
  void poison_relayed();
  void poison_slices();
  [[noreturn]] void wrong(const std::string& what) const;
  std::size_t output_rows() const;
  const char* scale_at(std::uint64_t row, std::uint32_t i) const;

  cpu::Exchange& e_;
  const Config& c_;
  const std::shared_ptr<Step> step_;
  const Role& role_;
  std::shared_ptr<const Plan> plan_;
  Totals& totals_;
  int stage_ = 0;                            // number of phases that are done
  std::uint32_t number_ = 0;
  Phase phase_ = Phase::None;
  double begun_ = 0, polled_ = 0;
  std::vector<double> waited_;               // indexed by rank: seconds of the current receive half
  std::unique_ptr<cpu::PhaseRun> run_;
  std::shared_ptr<cpu::Received> received_;
  std::vector<bool> relayed_;                // indexed by source of this relay: the node has returned all of its rows

  // The caller's tensors. Rows of x, of the experts' outputs and of y have gaps between them.
  static constexpr std::size_t kGap = 16;
  std::vector<char> x_, scales_in_, out_, scales_, expert_out_, y_;
  std::vector<float> weights_, late_weights_, out_weights_, topk_weights_, tail_, tail_out_;
  std::vector<std::int32_t> counts_, offsets_, src_rank_, src_token_, topk_ids_;
  std::int32_t num_rows_ = -77;
  bool scales_by_column_ = false;
};

}  // namespace pplx::sim
