// What latency histograms hold, as Python reads it.
#pragma once

#include <pybind11/stl.h>

#include <span>
#include <utility>
#include <vector>

#include "base/latency.hpp"
#include "python/module.hpp"

namespace moonpool::python {

// By name: (upper bounds in seconds, counts of the buckets and of what is above them, sum in seconds).
inline py::dict histogram_rows(std::span<const std::pair<const char*, const LatencyHistogram*>> rows) {
    py::dict all;
    for (auto& [name, histogram] : rows) {
        std::vector<double> bounds(LatencyHistogram::kBoundsSeconds.begin(),
                                   LatencyHistogram::kBoundsSeconds.end());
        std::vector<uint64_t> counts;
        for (size_t i = 0; i <= bounds.size(); ++i) counts.push_back(histogram->count(i));
        all[name] = py::make_tuple(bounds, counts, histogram->sum_seconds());
    }
    return all;
}

}  // namespace moonpool::python
