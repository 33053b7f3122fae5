"""Checked by mypy and never run: each line that it must refuse says so, and mypy refuses to be told so in vain."""

import gradtool

gradtool.clip("grads", max_norm=1, threads=4, nonfinite="zero", include=["a"], progress=print)
gradtool.accumulate(["a", "b"], into="buffer", weight=[1, 2], missing="skip", write="inplace")
gradtool.accumulate(["a", "b"], output="mean", mean=True, dtype="BF16", missing="zero")
gradtool.layernorm_backward("acts", kind="rmsnorm", y_grad="dY", backend="cuda", device=1)
gradtool.layernorm_backward(["acts", "model"], affine=False, scale_grad="weight", output="grads")
gradtool.recover("grads", force=True)
gradtool.doctor("grads")
gradtool.norm(["a", "b"], by_file=True, concat=True, histogram=True)
gradtool.accumulate("grad", output_dir="buffer", max_shard_size="5GB")
gradtool.accumulate("grad", output_dir="buffer", max_shard_size=5_000_000_000)
gradtool.accumulate("grad", output_dir="buffer", shard_like="model")

gradtool.clip("grads", max_nrom=1)  # type: ignore[call-arg]
gradtool.clip("grads", max_norm="1")  # type: ignore[arg-type]
gradtool.clip("grads", nonfinite="skip")  # type: ignore[arg-type]
gradtool.norm("grads", backend="gpu")  # type: ignore[arg-type]
gradtool.norm("grads", output="copy")  # type: ignore[call-arg]
gradtool.zero("grads", write="in-place")  # type: ignore[arg-type]
gradtool.accumulate("grad", into="buffer", dtype="I32")  # type: ignore[arg-type]
gradtool.accumulate("grad", into="buffer", dtype="bf16")  # type: ignore[arg-type]
gradtool.accumulate("grad", into="buffer", max_shard_size=1.5)  # type: ignore[arg-type]
gradtool.layernorm_backward("acts", kind="batchnorm")  # type: ignore[arg-type]
gradtool.recover("grads", progress=None)  # type: ignore[call-arg]
gradtool.doctor(["a", "b"])  # type: ignore[arg-type]
