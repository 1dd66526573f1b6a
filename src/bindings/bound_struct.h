// A plain struct that Python fills by keyword and C++ takes as one argument: Tokens(x=..., stride=...). Nothing can be swapped by
// mistake, nothing that is required be forgotten. Made by a vectorcall of its own in 0.1 us: a constructor of pybind11's with the
// same keywords takes 1.6 us, and a step makes four of them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pplx {

enum class Presence : bool { Optional, Required };

template <typename T>
class BoundStruct {
 public:
  struct Field {
    const char* name;
    const char* type;                       // as Python calls it
    bool (*set)(T&, PyObject*);             // false, or a Python error is set
    PyObject* (*get)(const T&);
    Presence presence;
    PyObject* interned = nullptr;
  };

  // field<&T::x>("x"), or field<&T::x, &Rows::stride>("x_stride") for what lies deeper.
  template <auto... Path>
  static Field field(const char* name, Presence presence = Presence::Optional) {
    using Value = std::remove_reference_t<decltype((std::declval<T&>() .* ... .* Path))>;
    return {name, std::is_same_v<Value, bool> ? "bool" : "int",
            [](T& value, PyObject* from) { return assign((value .* ... .* Path), from); },
            [](const T& value) { return object_of((value .* ... .* Path)); }, presence};
  }
  template <auto... Path>
  static Field required(const char* name) {
    return field<Path...>(name, Presence::Required);
  }

  static void bind(pybind11::module_& m, const char* name, const char* doc, std::vector<Field> fields);

  static bool is_one(pybind11::handle object) { return Py_TYPE(object.ptr()) == type_; }
  static const T& of(pybind11::handle object) { return reinterpret_cast<Object*>(object.ptr())->value; }

 private:
  struct Object {
    PyObject_HEAD
    T value;
  };

  static bool assign(bool& to, PyObject* from) {
    to = from == Py_True;
    return PyBool_Check(from);
  }
  template <typename Number>
  static bool assign(Number& to, PyObject* from) {
    if (!PyLong_Check(from) || PyBool_Check(from)) return false;
    if constexpr (std::is_pointer_v<Number>) {
      to = static_cast<Number>(PyLong_AsVoidPtr(from));
      return to != nullptr || PyErr_Occurred() == nullptr;
    } else {
      static_assert(std::is_unsigned_v<Number>);
      const unsigned long long value = PyLong_AsUnsignedLongLong(from);
      if (PyErr_Occurred() != nullptr) return false;
      to = static_cast<Number>(value);
      if (value <= std::numeric_limits<Number>::max()) return true;
      PyErr_Format(PyExc_OverflowError, "%llu is more than %llu", value,
                   static_cast<unsigned long long>(std::numeric_limits<Number>::max()));
      return false;
    }
  }

  static PyObject* object_of(bool value) { return PyBool_FromLong(value); }
  template <typename Number>
  static PyObject* object_of(Number value) {
    if constexpr (std::is_pointer_v<Number>)
      return PyLong_FromUnsignedLongLong(reinterpret_cast<std::uintptr_t>(value));
    else
      return PyLong_FromUnsignedLongLong(value);
  }
  static PyObject* read(PyObject* self, void* field) {
    return static_cast<Field*>(field)->get(reinterpret_cast<Object*>(self)->value);
  }

  static PyObject* make(PyObject*, PyObject* const* arguments, std::size_t count, PyObject* names);
  static bool fill(T& value, PyObject* const* arguments, PyObject* names);
  static std::size_t find(PyObject* name, std::size_t guess);
  static void destroy(PyObject* self);
  static PyObject* documented_only(PyObject*, PyObject*, PyObject*) {
    PyErr_SetString(PyExc_TypeError, "made by a call of the class only");
    return nullptr;
  }

  static inline PyTypeObject* type_ = nullptr;
  static inline std::vector<Field> fields_;
  static inline std::uint64_t required_ = 0;   // a bit a field
  static inline std::string name_, signature_;
  static inline PyMethodDef methods_[2] = {};
  static inline std::vector<PyGetSetDef> properties_;
};

template <typename T>
void BoundStruct<T>::bind(pybind11::module_& m, const char* name, const char* doc, std::vector<Field> fields) {
  fields_ = std::move(fields);
  name_ = m.attr("__name__").cast<std::string>() + "." + name;
  signature_ = "__init__(self: " + std::string(name) + ", *";
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    Field& field = fields_[i];
    field.interned = PyUnicode_InternFromString(field.name);
    const bool must = field.presence == Presence::Required;
    if (must) required_ |= std::uint64_t{1} << i;
    signature_ += std::string(", ") + field.name + ": " + field.type + (must ? "" : field.type == std::string("bool")
        ? " = False" : " = 0");
  }
  signature_ += ") -> None\n";
  // Shows readers the signature; calls of the class go to make().
  methods_[0] = {"__init__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&documented_only)),
                 METH_VARARGS | METH_KEYWORDS, signature_.c_str()};
  for (Field& field : fields_) properties_.push_back({field.name, &read, nullptr, nullptr, &field});
  properties_.push_back({});
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
                         {Py_tp_doc, const_cast<char*>(doc)},
                         {Py_tp_methods, methods_},
                         {Py_tp_getset, properties_.data()},
                         {0, nullptr}};
  PyType_Spec spec{name_.c_str(), sizeof(Object), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw pybind11::error_already_set();
  type_ = reinterpret_cast<PyTypeObject*>(type);
  type_->tp_vectorcall = &make;
  m.add_object(name, type);
}

template <typename T>
PyObject* BoundStruct<T>::make(PyObject*, PyObject* const* arguments, std::size_t count, PyObject* names) {
  if (PyVectorcall_NARGS(count) != 0) {
    PyErr_Format(PyExc_TypeError, "%s takes keywords only", name_.c_str());
    return nullptr;
  }
  PyObject* const self = type_->tp_alloc(type_, 0);
  if (self == nullptr) return nullptr;
  T* const value = new (&reinterpret_cast<Object*>(self)->value) T();
  if (fill(*value, arguments, names)) return self;
  Py_DECREF(self);
  return nullptr;
}

template <typename T>
bool BoundStruct<T>::fill(T& value, PyObject* const* arguments, PyObject* names) {
  std::uint64_t missing = required_;
  const Py_ssize_t given = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < given; ++i) {
    const std::size_t at = find(PyTuple_GET_ITEM(names, i), static_cast<std::size_t>(i));
    if (at == fields_.size()) {
      PyErr_Format(PyExc_TypeError, "%s has no %R", name_.c_str(), PyTuple_GET_ITEM(names, i));
      return false;
    }
    if (!fields_[at].set(value, arguments[i])) {
      if (PyErr_Occurred() == nullptr)
        PyErr_Format(PyExc_TypeError, "%s: %s is %R, not %s", name_.c_str(), fields_[at].name, arguments[i], fields_[at].type);
      return false;
    }
    missing &= ~(std::uint64_t{1} << at);
  }
  for (std::size_t at = 0; missing != 0; ++at, missing >>= 1) {
    if ((missing & 1) == 0) continue;
    PyErr_Format(PyExc_TypeError, "%s needs %s=", name_.c_str(), fields_[at].name);
    return false;
  }
  return true;
}

// Calls name their fields in the order of the struct, and most of them: so the next one is the first to look at.
template <typename T>
std::size_t BoundStruct<T>::find(PyObject* name, std::size_t guess) {
  for (std::size_t n = 0, at = guess; n < fields_.size(); ++n, ++at)
    if (fields_[at % fields_.size()].interned == name) return at % fields_.size();
  for (std::size_t at = 0; at < fields_.size(); ++at)   // a name that was made at run time
    if (PyUnicode_Compare(name, fields_[at].interned) == 0) return at;
  return fields_.size();
}

template <typename T>
void BoundStruct<T>::destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<Object*>(self)->value.~T();
  type->tp_free(self);
  Py_DECREF(type);
}

// To be the type_caster of a T, with a `name`.
template <typename T>
class BoundCaster {
 public:
  template <typename>
  using cast_op_type = const T&;
  bool load(pybind11::handle source, bool) {
    if (!BoundStruct<T>::is_one(source)) return false;
    value_ = &BoundStruct<T>::of(source);
    return true;
  }
  operator const T&() const { return *value_; }

 private:
  const T* value_ = nullptr;
};

}  // namespace pplx
