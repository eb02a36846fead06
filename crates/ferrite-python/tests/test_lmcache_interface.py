"""Compares the copy of LMCache's interface, and the example, with the source of the real package.

The package cannot be imported without torch and CUDA, so its source is parsed. `test` downloads it.
"""
import ast
import os
import sys

import lmcache_interface

SOURCE = os.environ.get("FERRITE_LMCACHE", os.path.join(sys.prefix, "lmcache"))
EXAMPLE = os.path.join(os.path.dirname(__file__), "../examples/lmcache_connector.py")


def methods(path, name):
    """Returns the methods of a class: whether each is async, abstract, and its arguments."""
    with open(path) as file:
        classes = [c for c in ast.walk(ast.parse(file.read())) if isinstance(c, ast.ClassDef)]
    [found] = [c for c in classes if c.name == name]
    return {
        method.name: (
            isinstance(method, ast.AsyncFunctionDef),
            any(ast.unparse(d).endswith("abstractmethod") for d in method.decorator_list),
            [argument.arg for argument in method.args.args],
        )
        for method in found.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def real(path, name):
    return methods(os.path.join(SOURCE, "lmcache", path), name)


CONNECTORS = "v1/storage_backend/connector/"


def test_is_the_version_that_the_copy_names():
    found = [name for name in os.listdir(SOURCE) if name.endswith(".dist-info")]
    assert found == [f"lmcache-{lmcache_interface.VERSION}.dist-info"]


def test_the_copy_of_the_connector_is_true():
    connector = real(CONNECTORS + "base_connector.py", "RemoteConnector")
    copy = methods(lmcache_interface.__file__, "RemoteConnector")
    assert {name: connector[name] for name in copy} == copy
    abstract = {name for name, (_, is_abstract, _) in connector.items() if is_abstract}
    assert abstract <= set(copy)


def test_the_example_overrides_what_exists():
    connector = real(CONNECTORS + "base_connector.py", "RemoteConnector")
    example = methods(EXAMPLE, "FerriteConnector")
    del example["__init__"]
    for name, (is_async, _, arguments) in example.items():
        assert (is_async, arguments) == (connector[name][0], connector[name][2]), name


def test_the_example_uses_what_exists():
    allocate = real("v1/storage_backend/local_cpu_backend.py", "LocalCPUBackend")["allocate"]
    assert allocate[0] is False and allocate[2][:4] == ["self", "shapes", "dtypes", "fmt"]
    for name in ("MemoryObj", "TensorMemoryObj"):
        assert {"byte_array", "ref_count_down"} <= set(real("v1/memory_management.py", name))
    assert "to_string" in real("utils.py", "CacheEngineKey")
    # Checks the arguments with which LMCache creates external connectors, and the release after a
    # put.
    with open(os.path.join(SOURCE, "lmcache", CONNECTORS, "external_adapter.py")) as file:
        calls = [c for c in ast.walk(ast.parse(file.read())) if isinstance(c, ast.Call)]
    [create] = [c for c in calls if ast.unparse(c.func) == "connector_class"]
    expected = methods(EXAMPLE, "FerriteConnector")["__init__"][2][1:]
    assert [keyword.arg for keyword in create.keywords] == expected
    with open(os.path.join(SOURCE, "lmcache", CONNECTORS, "instrumented_connector.py")) as file:
        assert "memory_obj.ref_count_down()" in file.read()
