"""Where the parts of this repository are, for tests that read its files or start processes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
FIXTURES = ROOT / "tests" / "fixtures"
SUPPORT = ROOT / "tests" / "support"
"""On PYTHONPATH in processes that import a helper of the tests by name, as `env: gated:Gated` does."""
REAL_MODEL = ROOT / "models" / "smollm2-135m"
