"""Objects with memory as flat views of bytes, without a copy."""
import sys


def byte_view(data, writable):
    """Returns a view of the bytes of a buffer, a NumPy array or a torch tensor on the CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        data = _tensor_bytes(torch, data)
    try:
        view = memoryview(data)
    except ValueError:  # a type of NumPy that has no buffers, such as datetime64
        view = memoryview(data.view("u1"))
    if writable and view.readonly:
        raise BufferError("the buffer is read-only")
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous in C order; pass a contiguous copy "
                         "(numpy.ascontiguousarray)")
    if view.nbytes == 0:
        return memoryview(bytearray())
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # a format that memoryview does not know, such as complex
        return memoryview(data.reshape(-1).view("u1"))


def _tensor_bytes(torch, tensor):
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}; copy it to the CPU first")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous in memory; pass tensor.contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
