#include "script.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

namespace pplx::sim {
namespace {

enum class Routing { Uniform, Zipf, OneHot, Repeats, Nowhere };

std::vector<std::int32_t> draw_ids(const Config& c, std::uint32_t tokens, Routing routing, std::uint32_t hot, Random& random) {
  const auto uniform = [&] { return static_cast<std::int32_t>(random.below(c.num_experts)); };
  std::vector<std::int32_t> ids;
  ids.reserve(std::size_t{tokens} * c.top_k);
  for (std::uint32_t t = 0; t < tokens; ++t) {
    const std::int32_t first = uniform();
    for (std::uint32_t k = 0; k < c.top_k; ++k) {
      if (routing == Routing::Nowhere || random.chance(0.08)) {
        ids.push_back(-1);
        continue;
      }
      switch (routing) {
        case Routing::OneHot: ids.push_back(static_cast<std::int32_t>(hot)); break;
        case Routing::Repeats: ids.push_back(random.chance(0.5) ? first : uniform()); break;
        // Half of what is left goes to each next expert, counted from the hot one.
        case Routing::Zipf: {
          std::uint32_t e = 0;
          while (e + 1 < c.num_experts && random.chance(0.5)) ++e;
          ids.push_back(static_cast<std::int32_t>((hot + e) % c.num_experts));
          break;
        }
        default: ids.push_back(uniform());
      }
    }
  }
  return ids;
}

// The least power of two, 2^-127 or more, that is no less than amax / 448.
float power_for(float amax) {
  double power = amax > 0x1p-100f ? power_of_two(exponent_of(amax) - 9) : 0x1p-127;   // 448 is less than 2^9
  while (power * 448.0 < static_cast<double>(amax)) power *= 2;
  return static_cast<float>(power);
}

// The codes and scales of one row: a float scale per 128, on MXFP8 an exponent per 32.
void quantise(const Config& c, const float* x, char* codes, char* scales) {
  const std::uint32_t block = scale_block(c.wire);
  for (std::uint32_t begin = 0; begin < c.hidden; begin += block) {
    const std::uint32_t end = std::min(c.hidden, begin + block);
    float amax = 0;
    for (std::uint32_t h = begin; h < end; ++h) amax = std::max(amax, std::fabs(x[h]));
    float scale = 1.0f, multiplier = 1.0f;
    if (amax != 0) {
      scale = c.wire == Wire::FP8 ? amax / 448.0f : power_for(amax);
      multiplier = c.wire == Wire::FP8 ? 448.0f / amax : 1.0f / scale;
    }
    if (c.wire == Wire::MXFP8)
      scales[begin / block] = static_cast<char>(std::ilogb(scale) + 127);
    else
      std::memcpy(scales + begin / block * sizeof scale, &scale, sizeof scale);
    for (std::uint32_t h = begin; h < end; ++h) codes[h] = static_cast<char>(bits_in(rounded(x[h] * multiplier, kE4m3), kE4m3, 4));
  }
}

void draw_tokens(const Config& c, const Step& step, Role& role, Random& random) {
  const std::size_t values = std::size_t{role.tokens} * c.hidden, size = dtype_bytes(c.dtype);
  for (std::size_t i = 0; i < role.ids.size(); ++i) {
    role.weights.push_back(step.unit_weights ? 1.0f : random.real(-1, 1));
    role.late_weights.push_back(random.real(-1, 1));
    role.tail.push_back(random.real(-1, 1));
  }
  const std::uint32_t payload = payload_bytes(c), scale = scale_bytes(c);
  role.payload.resize(std::size_t{role.tokens} * (payload + scale));
  role.seen.resize(values);
  std::vector<float> row(c.hidden);
  if (step.quantised)
    role.scales.resize(std::size_t{role.tokens} * scale);
  else
    role.x.resize(values * size);
  for (std::uint32_t t = 0; t < role.tokens; ++t) {
    char* to = role.payload.data() + std::size_t{t} * (payload + scale);
    for (std::uint32_t h = 0; h < c.hidden; ++h) {
      row[h] = random.chance(0.01) ? 0.0f : rounded_to(random.real(-4, 4), c.dtype);
      if (!step.quantised) store(role.x.data() + (std::size_t{t} * c.hidden + h) * size, row[h], c.dtype);
    }
    if (quantised(c.wire)) {
      if (random.chance(0.05)) std::fill_n(row.begin(), std::min(c.hidden, scale_block(c.wire)), 0.0f);
      if (!step.quantised)
        for (std::uint32_t h = 0; h < c.hidden; ++h) store(role.x.data() + (std::size_t{t} * c.hidden + h) * size, row[h], c.dtype);
      quantise(c, row.data(), to, to + payload);
    } else {
      std::memcpy(to, role.x.data() + std::size_t{t} * payload, payload);
    }
    decode_row(c, to, to + payload, role.seen.data() + std::size_t{t} * c.hidden);
    if (!step.quantised) continue;
    role.x.insert(role.x.end(), to, to + payload);
    std::memcpy(role.scales.data() + std::size_t{t} * scale, to + payload, scale);
  }
  if (!step.accumulate) return;
  role.before.resize(values * size);
  for (std::size_t i = 0; i < values; ++i) store(role.before.data() + i * size, rounded_to(random.real(-4, 4), c.dtype), c.dtype);
}

// Finds the receivers of each choice, and the choices that have room.
void route(const Config& c, Step& step) {
  const bool compact = c.layout == LayoutKind::Compact;
  step.arrivals.resize(c.world);
  for (std::uint32_t d = 0; d < c.world; ++d) step.arrivals[d].resize(compact ? 1 : local_experts(c, d));
  for (std::uint32_t s = 0; s < c.world; ++s)
    for (std::uint32_t t = 0; t < step.roles[s].tokens; ++t)
      for (std::uint32_t k = 0; k < c.top_k && sends(step.roles[s], t); ++k) {
        const std::int32_t id = step.roles[s].ids[std::size_t{t} * c.top_k + k];
        if (id < 0) continue;
        const std::uint32_t d = static_cast<std::uint32_t>(id) / experts_per_rank(c);
        std::vector<Choice>& list = step.arrivals[d][compact ? 0 : static_cast<std::uint32_t>(id) % experts_per_rank(c)];
        if (compact && !list.empty() && list.back().source == s && list.back().token == t) continue;
        list.push_back({s, t, k});
      }
  for (Role& role : step.roles) role.fits.assign(role.ids.size(), 0);
  for (std::uint32_t d = 0; d < c.world; ++d) {
    std::uint64_t start = 0;
    for (std::size_t e = 0; e < step.arrivals[d].size(); ++e) {
      const std::vector<Choice>& list = step.arrivals[d][e];
      for (std::size_t i = 0; i < list.size(); ++i) {
        const bool fits = c.layout == LayoutKind::Padded ? i < c.max_per_expert : start + i < c.max_rows;
        Role& role = step.roles[list[i].source];
        const std::size_t at = std::size_t{list[i].token} * c.top_k;
        if (!compact) {
          role.fits[at + list[i].k] = fits;
          continue;
        }
        for (std::uint32_t k = 0; k < c.top_k; ++k)
          if (role.ids[at + k] >= 0 && static_cast<std::uint32_t>(role.ids[at + k]) / experts_per_rank(c) == d)
            role.fits[at + k] = fits;
      }
      if (c.layout == LayoutKind::Padded) {
        step.overflows |= list.size() > c.max_per_expert;
      } else {
        start = compact ? list.size() : align_up(start + list.size(), c.align);
        step.overflows |= start > c.max_rows;
      }
    }
  }
  // A choice that had no room is missing from the outputs of all ranks that hold the token.
  for (std::uint32_t r = 0; r < c.world; ++r)
    for (std::uint32_t other = 0; other < c.world; ++other)
      for (std::uint32_t t = 0; t < step.roles[r].tokens && r / c.replicas == other / c.replicas; ++t)
        if (sends(step.roles[r], t) && other != r && step.roles[other].tokens > 0)
          std::copy_n(step.roles[r].fits.begin() + t * c.top_k, c.top_k, step.roles[other].fits.begin() + t * c.top_k);
}

// Consecutive ranks hold the same tokens; the living ones divide them among themselves.
std::vector<std::uint32_t> group_of(const Config& c, const std::vector<bool>& alive, std::uint32_t rank) {
  std::vector<std::uint32_t> group;
  for (std::uint32_t r = 0; r < c.world; ++r)
    if (alive[r] && r / c.replicas == rank / c.replicas) group.push_back(r);
  return group;
}

}  // namespace

void decode_row(const Config& c, const char* payload, const char* scales, float* out) {
  if (!quantised(c.wire)) {
    for (std::uint32_t h = 0; h < c.hidden; ++h) out[h] = load(payload + std::size_t{h} * dtype_bytes(c.dtype), c.dtype);
    return;
  }
  static const std::array<float, 256> values = [] {
    std::array<float, 256> all;
    for (std::uint32_t i = 0; i < 256; ++i) all[i] = value_of(i, kE4m3, 4);
    return all;
  }();
  const std::uint32_t block = scale_block(c.wire);
  for (std::uint32_t begin = 0; begin < c.hidden; begin += block) {
    float scale;
    if (c.wire == Wire::MXFP8)
      scale = std::ldexp(1.0f, static_cast<std::uint8_t>(scales[begin / block]) - 127);
    else
      std::memcpy(&scale, scales + begin / block * sizeof scale, sizeof scale);
    for (std::uint32_t h = begin; h < std::min(c.hidden, begin + block); ++h)
      out[h] = values[static_cast<std::uint8_t>(payload[h])] * scale;
  }
}

std::unique_ptr<Step> make_step(const Config& c, const std::vector<bool>& alive, std::uint32_t number, const Step* before,
                                std::uint64_t seed) {
  Random random(seed);
  auto made = std::make_unique<Step>();
  Step& step = *made;
  const bool compact = c.layout == LayoutKind::Compact;
  step.number = number;
  step.released = random.chance(0.08);
  step.weighted = compact || !random.chance(0.1);
  step.late = !compact && step.weighted && random.chance(0.15);
  step.has_tail = !step.released && random.chance(0.3);
  step.accumulate = random.chance(0.15);
  step.unit_weights = random.chance(0.1);
  step.keep_own = random.chance(0.5);
  step.quantised = quantised(c.wire) && random.chance(0.3);
  step.same_plan = before != nullptr && random.chance(0.1);
  const auto routing = static_cast<Routing>(random.chance(0.5) ? 0 : random.below(5));
  const auto hot = static_cast<std::uint32_t>(random.below(c.num_experts));
  const bool nobody = random.chance(0.03), everybody = random.chance(0.1);
  step.roles.resize(c.world);
  for (std::uint32_t r = 0; r < c.world; ++r) {
    Role& role = step.roles[r];
    if (!alive[r]) continue;
    const std::vector<std::uint32_t> group = group_of(c, alive, r);
    const auto slice = static_cast<std::uint32_t>(std::find(group.begin(), group.end(), r) - group.begin());
    if (slice > 0) {
      role = step.roles[group[0]];
      role.slice = slice;
      continue;
    }
    role.slices = static_cast<std::uint32_t>(group.size());
    const std::uint32_t most = std::min(c.max_tokens, ceil_div(c.max_tokens, c.replicas) * role.slices);
    if (step.same_plan) {
      role.tokens = before->roles[r].tokens;
      role.ids = before->roles[r].ids;
    } else {
      role.tokens = nobody || random.chance(0.15) ? 0 : everybody ? most : random.between(0u, most);
      role.ids = draw_ids(c, role.tokens, routing, hot, random);
      for (std::int32_t& id : role.ids)
        if (id >= 0 && !alive[static_cast<std::uint32_t>(id) / experts_per_rank(c)])
          id = id * -1 - 2;   // the caller still names it
    }
    draw_tokens(c, step, role, random);
  }
  route(c, step);
  return made;
}

std::vector<char> combined(const Config& c, const Step& step, std::uint32_t rank) {
  const Role& role = step.roles[rank];
  const std::vector<float>& weights = step.late ? role.late_weights : role.weights;
  const std::size_t size = dtype_bytes(c.dtype);
  std::vector<char> y(std::size_t{role.tokens} * c.hidden * size);
  std::vector<float> total(c.hidden), of_node(c.hidden), partial(c.hidden), value(c.hidden);
  Config fp8 = c;
  fp8.wire = Wire::FP8;
  std::vector<char> codes(c.hidden), scales(scale_bytes(fp8));
  // On one node the sum of each rank's rows counts as that of a node.
  const bool one_node = std::adjacent_find(step.nodes.begin(), step.nodes.end(), std::not_equal_to<>()) == step.nodes.end();
  const auto node_of = [&](std::uint32_t owner) { return one_node ? owner : step.nodes[owner]; };
  for (std::uint32_t t = 0; t < role.tokens; ++t) {
    const float* row = role.seen.data() + std::size_t{t} * c.hidden;
    const std::size_t at = std::size_t{t} * c.top_k;
    for (std::uint32_t h = 0; h < c.hidden; ++h)
      total[h] = step.accumulate ? load(role.before.data() + (std::size_t{t} * c.hidden + h) * size, c.dtype) : 0.0f;
    std::array<std::uint32_t, kMaxTopK> order;
    std::uint32_t n = 0;
    for (std::uint32_t k = 0; k < c.top_k; ++k)
      if (role.ids[at + k] >= 0) order[n++] = k;
    const auto owner = [&](std::uint32_t k) { return static_cast<std::uint32_t>(role.ids[at + k]) / experts_per_rank(c); };
    std::stable_sort(order.begin(), order.begin() + n, [&](std::uint32_t a, std::uint32_t b) {
      return std::pair(node_of(owner(a)), owner(a)) < std::pair(node_of(owner(b)), owner(b));
    });
    std::fill(of_node.begin(), of_node.end(), -0.0f);
    for (std::uint32_t i = 0; i < n;) {
      std::fill(partial.begin(), partial.end(), 0.0f);
      const std::uint32_t rank_of_run = owner(order[i]);
      for (; i < n && owner(order[i]) == rank_of_run; ++i) {
        const std::uint32_t k = order[i];
        if (role.fits[at + k] == 0) continue;
        const auto expert = static_cast<std::uint32_t>(role.ids[at + k]);
        expert_row(row, c.hidden, expert, c.dtype, value.data());
        for (std::uint32_t h = 0; h < c.hidden; ++h) {
          const float term = step.weighted ? weights[at + k] * value[h] : value[h];
          partial[h] = partial[h] + term;
        }
      }
      for (std::uint32_t h = 0; h < c.hidden; ++h) of_node[h] = of_node[h] + rounded_to(partial[h], c.dtype);
      if (i < n && node_of(owner(order[i])) == node_of(rank_of_run)) continue;
      for (float& sum : of_node) sum = rounded_to(sum, c.dtype);
      if (c.combine_fp8 && node_of(rank_of_run) != node_of(rank)) {   // a relay answers
        quantise(fp8, of_node.data(), codes.data(), scales.data());
        decode_row(fp8, codes.data(), scales.data(), of_node.data());
        for (float& sum : of_node) sum = rounded_to(sum, c.dtype);
      }
      for (std::uint32_t h = 0; h < c.hidden; ++h) total[h] = total[h] + of_node[h];
      std::fill(of_node.begin(), of_node.end(), -0.0f);
    }
    for (std::uint32_t h = 0; h < c.hidden; ++h)
      store(y.data() + (std::size_t{t} * c.hidden + h) * size, rounded_to(total[h], c.dtype), c.dtype);
  }
  return y;
}

}  // namespace pplx::sim
