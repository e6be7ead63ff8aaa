"""The exceptions pyinfer raises on purpose. Each message names the thing at fault and what to do about it."""


class PyinferError(Exception):
    """Base of every error that pyinfer raises on purpose."""


class ModelError(PyinferError):
    """A model file that cannot be run: malformed, inconsistent, or of a kind pyinfer does not know.

    The message names the file's key or tensor at fault.
    """


class FetchError(PyinferError):
    """A model that could not be found or downloaded."""


class ChatError(PyinferError):
    """A chat template that is missing, is not valid or cannot be rendered, or messages that it refuses."""


class BackendError(PyinferError):
    """A backend, instruction-set level or thread count that is unknown or unavailable here."""


class ContextOverflowError(PyinferError):
    """More tokens than the context holds. Nothing was computed; the message gives the counts."""


class CacheFullError(PyinferError):
    """A pool of cache blocks that sequences share has too few left. Nothing was computed; the message gives
    the counts.
    """


class OutOfMemoryError(PyinferError, MemoryError):
    """A KV cache that this machine's memory cannot hold. Nothing was loaded; the message gives the bytes."""


class NonFiniteLogitsError(PyinferError):
    """A forward pass gave NaN or infinity where a token was to be picked."""


class ClosedError(PyinferError):
    """A model used after it was closed."""


class InputError(PyinferError, ValueError):
    """An argument that cannot be used: text that is not valid Unicode, a token id outside the vocabulary."""
