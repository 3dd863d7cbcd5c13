import subprocess
import sys


def test_package_imports_no_torch() -> None:
    code = "import sys, spark_kernels, spark_kernels.errors, spark_kernels.ggml; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "False"
