"""The one exception of `models`.

ModelError(kind, message)
    checkpoint   a weight file, index or config is missing, damaged or does not fit the model
    unsupported  a legal checkpoint or setting that this code does not render
    input        a request that the loaded model cannot render
    memory       the work does not fit, known before it starts
    nonfinite    latents or frames turned NaN or infinite
    device       the accelerator failed
    environment  this installation or process environment cannot work

`batch_gen.errors` maps each kind to its retry class and exit code; nothing here knows them.
"""


class ModelError(Exception):
    """A failure of a model with its kind; the message says what, where and what to do."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[type["ModelError"], tuple[str, str]]:
        return (type(self), (self.kind, self.message))
