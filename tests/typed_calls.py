"""Checked by mypy and never run: each line that it must refuse says so, and mypy refuses to be told so in vain."""

import gradtool

gradtool.clip("grads", max_norm=1, threads=4, nonfinite="zero", include=["a"], progress=print)
gradtool.accumulate("buffer", ["a", "b"], weight=[1, 2], dtype="BF16", missing="skip", write="inplace")
gradtool.layernorm_backward("acts", kind="rmsnorm", y_grad="dY", backend="cuda", device=1)
gradtool.layernorm_backward(["acts", "model"], affine=False, scale_grad="weight", output="grads")
gradtool.recover("grads", force=True)
gradtool.doctor("grads")
gradtool.norm(["a", "b"], by_file=True, concat=True, histogram=True)
gradtool.accumulate("buffer", "grad", create=True, max_shard_size="5GB")
gradtool.accumulate("buffer", "grad", create=True, max_shard_size=5_000_000_000)
gradtool.accumulate("buffer", "grad", create=True, shard_like="model")

gradtool.clip("grads", max_nrom=1)  # type: ignore[call-arg]
gradtool.clip("grads", max_norm="1")  # type: ignore[arg-type]
gradtool.clip("grads", nonfinite="skip")  # type: ignore[arg-type]
gradtool.norm("grads", backend="gpu")  # type: ignore[arg-type]
gradtool.norm("grads", output="copy")  # type: ignore[call-arg]
gradtool.zero("grads", write="in-place")  # type: ignore[arg-type]
gradtool.accumulate("buffer", "grad", dtype="I32")  # type: ignore[arg-type]
gradtool.accumulate("buffer", "grad", dtype="bf16")  # type: ignore[arg-type]
gradtool.accumulate("buffer", "grad", max_shard_size=1.5)  # type: ignore[arg-type]
gradtool.layernorm_backward("acts", kind="batchnorm")  # type: ignore[arg-type]
gradtool.recover("grads", progress=None)  # type: ignore[call-arg]
gradtool.doctor(["a", "b"])  # type: ignore[arg-type]
