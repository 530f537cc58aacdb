// Assigns the samples of a global batch to ranks. partition.py describes the algorithm and implements it in Python.
// Both must make the same comparisons and the same sums in the same order, so that their results are equal to the bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <new>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Index = int64_t;

// Disjoint sets of samples, one per rank, largest sum first. Sets are lists, chained through `next`.
struct Sets {
  std::vector<double> sums;
  std::vector<Index> heads, tails;
  double spread() const { return sums.front() - sums.back(); }
};

class Differencing {
 public:
  Differencing(Index ranks, Index samples) : ranks_(ranks), next_(samples, -1) {}

  // Merges the groups of `ranks` samples each, given in order of decreasing workload.
  Sets merge_all(const std::vector<Index>& order, Index groups, const double* workloads) {
    using Entry = std::tuple<double, Index, Index>;  // -spread, time of creation, index
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> open;
    std::vector<Sets> made(groups);
    for (Index group = 0; group < groups; ++group) {
      Sets& sets = made[group];
      sets.heads.assign(order.begin() + group * ranks_, order.begin() + (group + 1) * ranks_);
      sets.tails = sets.heads;
      for (Index sample : sets.heads) sets.sums.push_back(workloads[sample]);
      open.emplace(-sets.spread(), group, group);
    }
    for (Index count = groups; open.size() > 1; ++count) {
      const Index one = std::get<2>(open.top());
      open.pop();
      const Index other = std::get<2>(open.top());
      open.pop();
      made[one] = merged(made[one], made[other]);
      made[other] = Sets();
      open.emplace(-made[one].spread(), count, one);
    }
    return made[std::get<2>(open.top())];
  }

  Index next(Index sample) const { return next_[sample]; }

 private:
  // Joins the largest set of one with the smallest set of the other.
  Sets merged(const Sets& one, const Sets& other) {
    std::vector<double> sums(ranks_);
    for (Index set = 0; set < ranks_; ++set) sums[set] = one.sums[set] + other.sums[ranks_ - 1 - set];
    std::vector<Index> falling(ranks_);
    std::iota(falling.begin(), falling.end(), 0);
    std::stable_sort(falling.begin(), falling.end(), [&](Index a, Index b) { return sums[a] > sums[b]; });
    Sets result;
    for (Index set : falling) {
      const Index opposite = ranks_ - 1 - set;
      next_[one.tails[set]] = other.heads[opposite];
      result.sums.push_back(sums[set]);
      result.heads.push_back(one.heads[set]);
      result.tails.push_back(other.tails[opposite]);
    }
    return result;
  }

  Index ranks_;
  std::vector<Index> next_;
};

// 4. While that helps, two samples are exchanged between the ranks with the largest and the smallest load: the two
// whose difference is nearest to half of the difference of the loads.
class Swaps {
 public:
  Swaps(Index samples, const double* workloads, const std::vector<Index>& order, Index ranks, int32_t* assignment)
      : workloads_(workloads), assignment_(assignment), loads_(ranks, 0.0), falling_(ranks) {
    for (Index sample = 0; sample < samples; ++sample) loads_[assignment[sample]] += workloads[sample];
    for (Index sample : order) falling_[assignment[sample]].push_back(sample);
  }

  void run(double enough, Index most) {
    for (Index done = 0; done < most; ++done) {
      const Index most_loaded = std::max_element(loads_.begin(), loads_.end()) - loads_.begin();
      const Index least_loaded = std::min_element(loads_.begin(), loads_.end()) - loads_.begin();
      if (!(loads_[most_loaded] > enough) || !swap(most_loaded, least_loaded)) return;
    }
  }

 private:
  bool swap(Index from, Index to) {
    std::vector<Index>&big = falling_[from], &small = falling_[to];
    if (big.empty() || small.empty()) return false;
    const double gap = loads_[from] - loads_[to], half = gap / 2;
    const Index last = static_cast<Index>(small.size()) - 1;
    double best = std::numeric_limits<double>::infinity();
    Index give = 0, take = 0, place = 0;
    for (Index one = 0; one < static_cast<Index>(big.size()); ++one) {
      // `place`: the first sample of the other rank whose workload is at most the ideal one.
      const double workload = workloads_[big[one]], ideal = workload - half;
      while (place <= last && workloads_[small[place]] > ideal) ++place;
      for (Index other : {std::max<Index>(place - 1, 0), std::min(place, last)}) {
        const double off = std::abs((workload - workloads_[small[other]]) - half);
        if (off < best) best = off, give = one, take = other;
      }
    }
    const double difference = workloads_[big[give]] - workloads_[small[take]];
    if (!(difference > 0 && difference < gap)) return false;
    loads_[from] -= difference;
    loads_[to] += difference;
    const Index given = big[give], taken = small[take];
    assignment_[given] = static_cast<int32_t>(to);
    assignment_[taken] = static_cast<int32_t>(from);
    replace(big, give, taken);
    replace(small, take, given);
    return true;
  }

  // Keeps the order: of equal samples, the one with the smaller index comes first.
  void replace(std::vector<Index>& list, Index place, Index sample) {
    list.erase(list.begin() + place);
    list.insert(std::upper_bound(list.begin(), list.end(), sample, [&](Index a, Index b) {
      return workloads_[a] > workloads_[b] || (workloads_[a] == workloads_[b] && a < b);
    }), sample);
  }

  const double* workloads_;
  int32_t* assignment_;
  std::vector<double> loads_;
  std::vector<std::vector<Index>> falling_;
};

double largest_sum(Index samples, const double* workloads, const int32_t* rank_of, Index ranks) {
  std::vector<double> sums(ranks, 0.0);
  for (Index sample = 0; sample < samples; ++sample) sums[rank_of[sample]] += workloads[sample];
  return *std::max_element(sums.begin(), sums.end());
}

void partition(Index samples, const double* workloads, const int32_t* source, Index ranks, double enough,
               int32_t* assignment) {
  std::vector<Index> counts(ranks, 0);
  for (Index sample = 0; sample < samples; ++sample) ++counts[source[sample]];
  const Index groups = *std::min_element(counts.begin(), counts.end());
  std::vector<Index> order(samples);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return workloads[a] > workloads[b]; });

  // 1. Gives each rank the number of samples that the smallest rank has.
  std::vector<double> loads(ranks, 0.0);
  if (groups > 0) {
    Differencing differencing(ranks, samples);
    const Sets sets = differencing.merge_all(order, groups, workloads);
    std::vector<Index> overlap(ranks * ranks, 0);  // [rank][set]
    for (Index set = 0; set < ranks; ++set)
      for (Index sample = sets.heads[set]; sample >= 0; sample = differencing.next(sample))
        ++overlap[source[sample] * ranks + set];

    // 2. The smaller sets go to the ranks with more room; among ranks with equal room, so that most samples stay.
    std::vector<Index> by_room(ranks);
    std::iota(by_room.begin(), by_room.end(), 0);
    std::stable_sort(by_room.begin(), by_room.end(), [&](Index a, Index b) { return counts[a] < counts[b]; });
    std::vector<Index> rank_of_set(ranks, -1), set_of_rank(ranks, -1);
    for (Index begin = 0, end = 0; begin < ranks; begin = end) {
      while (end < ranks && counts[by_room[end]] == counts[by_room[begin]]) ++end;
      std::vector<std::tuple<Index, Index, Index>> pairs;  // -overlap, rank, set
      for (Index place = begin; place < end; ++place)
        for (Index set = begin; set < end; ++set)
          pairs.emplace_back(-overlap[by_room[place] * ranks + set], by_room[place], set);
      std::sort(pairs.begin(), pairs.end());
      for (const auto& [_, rank, set] : pairs)
        if (set_of_rank[rank] < 0 && rank_of_set[set] < 0) {
          set_of_rank[rank] = set;
          rank_of_set[set] = rank;
        }
    }
    for (Index set = 0; set < ranks; ++set) {
      const Index rank = rank_of_set[set];
      loads[rank] = sets.sums[set];
      for (Index sample = sets.heads[set]; sample >= 0; sample = differencing.next(sample))
        assignment[sample] = static_cast<int32_t>(rank);
    }
  }

  // 3. The other samples, largest first, go to the rank with the smallest load that has room.
  using Rank = std::pair<double, Index>;
  std::priority_queue<Rank, std::vector<Rank>, std::greater<Rank>> open;
  for (Index rank = 0; rank < ranks; ++rank)
    if ((counts[rank] -= groups) > 0) open.emplace(loads[rank], rank);
  for (Index place = groups * ranks; place < samples; ++place) {
    auto [load, rank] = open.top();
    open.pop();
    assignment[order[place]] = static_cast<int32_t>(rank);
    if (--counts[rank] > 0) open.emplace(load + workloads[order[place]], rank);
  }

  double total = 0.0;
  for (Index sample = 0; sample < samples; ++sample) total += workloads[sample];
  Swaps(samples, workloads, order, ranks, assignment).run(enough * (total / ranks), 8 * ranks);

  // 5. A partition that is not better is discarded.
  if (!(largest_sum(samples, workloads, assignment, ranks) < largest_sum(samples, workloads, source, ranks)))
    std::copy(source, source + samples, assignment);
}

}  // namespace

// workloads: finite. source: current rank of each sample, in 0 to ranks - 1. enough: largest load of a rank that is
// accepted, as a multiple of the mean. Returns 0, or 1 if memory ran out.
extern "C" __attribute__((visibility("default"))) int lp_partition(
    int64_t samples, const double* workloads, const int32_t* source, int64_t ranks, double enough,
    int32_t* assignment) {
  try {
    partition(samples, workloads, source, ranks, enough, assignment);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
