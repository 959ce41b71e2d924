// Measures of the machine, for benchmarks.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bench/ceiling.h"
#include "bind/bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace potok {

void bind_ceiling(nb::module_& m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::module_ c = m.def_submodule("ceiling", "What the machine gives, measured by loops of their own.");
    c.def("fma_widths", &fma_widths, "Vector widths that fma_macs_per_second takes here, narrowest first.");
    c.def("fma_macs_per_second", &fma_macs_per_second, "threads"_a, "width"_a, Release(),
          "float32 multiply-adds a second, from registers.");
    c.def("stream_bytes_per_second", &stream_bytes_per_second, "threads"_a, "bytes"_a, "huge_pages"_a = true, Release(),
          "Bytes a second, read from so much memory on huge pages, or on small ones.");
    c.def("clock_hz", &clock_hz, Release(), "Clock of a busy core.");
}

}  // namespace potok
