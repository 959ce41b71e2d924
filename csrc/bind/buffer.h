// Memory that a Python object holds, without a description of it: a third of the time that an ndarray takes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace potok {

// Contiguous elements of T in bytes, an array.array or a numpy array. A struct is read from bytes.
template <class T>
class Buffer {
 public:
    explicit Buffer(nanobind::handle owner) {
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nanobind::python_error();
        constexpr bool is_struct = std::is_class_v<T>;
        const char* kinds = is_struct ? "B" : std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "il" : "LQ";
        const bool fits = view_.len % sizeof(T) == 0 && (is_struct || view_.itemsize == sizeof(T));
        if (!fits || strchr(kinds, view_.format[0]) == nullptr || view_.format[0] == 0) {
            PyBuffer_Release(&view_);
            throw std::invalid_argument("an array of a step holds elements of another type");
        }
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    T* data() const { return static_cast<T*>(view_.buf); }
    size_t size() const { return (size_t)view_.len / sizeof(T); }

 private:
    Py_buffer view_;
};

// Of a tuple.
inline nanobind::handle field(nanobind::handle tuple, int i) {
    PyObject* item = PyTuple_Check(tuple.ptr()) ? PyTuple_GetItem(tuple.ptr(), i) : nullptr;
    if (item == nullptr) throw std::invalid_argument("a step is described by tuples, of as many fields as it has");
    return item;
}

}  // namespace potok
