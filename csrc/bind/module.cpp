#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "runtime/isa.h"

NB_MODULE(_native, m) {
    m.doc() = "The native executor: packed weights, a recorded plan replayed for one step at a time, and its kernels.";
    m.def("supported_isas", &potok::supported_isas, "Names of the kernel tables that this CPU can run, best first.");
    potok::bind_replay(m);
    potok::bind_kernels(m);
    potok::bind_ceiling(m);
}
