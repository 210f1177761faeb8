"""The noise: what it is (against published vectors and the design), and the faults of others that it rules out."""

import subprocess
import sys
import zlib

import numpy as np
import pytest

from hpc_es.errors import ConfigError
from hpc_es.noise import BLOCK, noise, reference, tensor_id
from hpc_es.noise.reference import Perturbation, Update

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ALL_ONES, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_published_vectors(word: int, expected: list[int]) -> None:
    assert [int(out) for out in reference.philox([word] * 4, [word] * 2)] == expected


def test_philox_gives_the_published_vector_for_digits_of_pi() -> None:
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    expected = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert [int(out) for out in reference.philox(counter, key)] == expected


def test_the_table_has_the_normative_checksum_and_the_moments_of_a_gaussian() -> None:
    table = reference.table()
    assert zlib.crc32(table.astype("<i2").tobytes()) == reference.TABLE_CRC32
    eps = table / 4096
    assert eps.mean() == 0
    assert round(float(eps.std()), 5) == 0.99999
    assert abs(float((eps**4).mean()) - 3) < 0.01
    assert float(np.abs(eps).max()) <= 4.33


def test_noise_follows_the_definition_word_by_word() -> None:
    seed, name, element = 0x0123456789ABCDEF, "model.layers.0.mlp.up_proj.weight", 8 * 5_000_000_000 + 3
    ident = tensor_id(name)
    counter = (5_000_000_000 & ALL_ONES, 5_000_000_000 >> 32, ident & ALL_ONES, ident >> 32)
    words = reference.philox(counter, (seed & ALL_ONES, seed >> 32))
    assert noise(seed, name, element, 1)[0] == reference.table()[int(words[1]) >> 16]


def test_noise_of_a_stretch_does_not_depend_on_where_it_is_cut() -> None:
    whole = noise(7, "a", 0, 5000)
    for start, count in ((0, 1), (3, 10), (8, 8), (1021, 1050), (4999, 1), (17, 0)):
        assert np.array_equal(noise(7, "a", start, count), whole[start : start + count])
    assert whole.dtype == np.int16


def test_noise_works_and_is_the_same_where_numba_is_missing() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from hpc_es.noise import noise; print(noise(5, 'w', 3, 9).tolist(), 'hpc_es.noise.cpu' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{noise(5, 'w', 3, 9).tolist()} False"


def test_importing_the_package_does_not_import_numba() -> None:
    code = "import sys, hpc_es.noise; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("seed", "start", "count"), [(-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_a_seed_or_range_that_means_nothing_is_refused(seed: int, start: int, count: int) -> None:
    with pytest.raises(ConfigError):
        noise(seed, "w", start, count)


# --- faults seen in other programs (design, section 4) ------------------------------------------------------------


def test_tensors_of_equal_shape_get_different_noise() -> None:
    one, other = noise(3, "layers.0.weight", 0, 40_000), noise(3, "layers.1.weight", 0, 40_000)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_shards_of_a_tensor_get_different_noise_and_together_that_of_the_whole() -> None:
    whole, half = noise(3, "w", 0, 40_000), 20_000
    assert np.array_equal(np.concatenate([noise(3, "w", 0, half), noise(3, "w", half, half)]), whole)
    assert abs(np.corrcoef(whole[:half], whole[half:])[0, 1]) < 0.03


def test_neighbouring_seeds_blocks_and_high_words_are_uncorrelated() -> None:
    seeds = [5, 6, 5 + 2**32, 5 + 2**63]
    stretches = [noise(seed, "w", 0, 40_000) for seed in seeds] + [noise(5, "w", BLOCK * 2**32, 40_000)]
    correlations = np.corrcoef(stretches) - np.eye(len(stretches))
    assert np.abs(correlations).max() < 0.03


def test_noise_is_standard_normal() -> None:
    eps = noise(11, "w", 0, 1_000_000) / 4096
    assert abs(eps.mean()) < 0.005
    assert abs(eps.std() - 1) < 0.005
    assert abs((np.abs(eps) < 1).mean() - 0.6827) < 0.003


def test_the_weights_after_many_members_are_those_before_since_nothing_is_subtracted() -> None:
    theta = np.random.default_rng(0).normal(0, 0.02, 4000).astype(np.float32)
    before, out = theta.copy(), np.empty(4000, np.uint16)
    for seed in range(30):
        reference.perturb(theta, out, 1, Perturbation(seed, 1e-3 / 4096))
    reference.perturb(theta, out, 1, None)
    assert theta.tobytes() == before.tobytes()
    assert np.array_equal(out, reference.cast(before, np.dtype(np.uint16)))


def test_the_update_replays_the_noise_that_was_evaluated() -> None:
    seeds, coefficients = [2**63 + 1, 17], [3e-7, -2e-7]
    theta = np.zeros(1000, np.float32)
    reference.update(theta, 9, [Update(seeds, coefficients)])
    direction = np.zeros(1000)
    for seed, coefficient in zip(seeds, coefficients, strict=True):
        out = np.empty(1000, np.float32)
        reference.perturb(np.zeros(1000, np.float32), out, 9, Perturbation(seed, 1.0))
        direction += np.float32(coefficient) * out.astype(np.float64)
    assert np.allclose(theta, direction, rtol=1e-6, atol=1e-9)


def test_two_members_with_one_seed_both_count() -> None:
    twice, doubled = np.zeros(100, np.float32), np.zeros(100, np.float32)
    reference.update(twice, 9, [Update([5, 5], [0.25, 0.25])])
    reference.update(doubled, 9, [Update([5], [0.5])])
    assert np.array_equal(twice, doubled)
    assert twice.any()


# --- subspaces, casts, digest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_subspaces", [2, 3, 7, 64])
def test_each_subspace_owns_one_block_of_every_group(num_subspaces: int) -> None:
    owners = reference.subspaces(77, tensor_id("w"), 0, BLOCK * num_subspaces * 50, num_subspaces)
    blocks = owners.reshape(50, num_subspaces, BLOCK)
    assert (blocks == blocks[..., :1]).all()
    assert (np.sort(blocks[..., 0], axis=1) == np.arange(num_subspaces)).all()


def test_the_assignment_of_blocks_to_subspaces_is_uniform() -> None:
    groups, size = 6000, 4
    orders = np.array([reference.permutation(123, tensor_id("w"), group, size) for group in range(groups)])
    for place in range(size):
        counts = np.bincount(orders[:, place], minlength=size)
        assert ((counts - groups / size) ** 2 / (groups / size)).sum() < 16.3  # chi-square, 3 degrees, p = 0.001
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - groups / 24) ** 2 / (groups / 24)).sum() < 49.7  # 23 degrees


def test_a_short_last_group_takes_the_first_entries_of_its_permutation() -> None:
    whole = reference.subspaces(5, 9, 0, BLOCK * 8, 8)
    assert np.array_equal(reference.subspaces(5, 9, 0, BLOCK * 3 - 2, 8), whole[: BLOCK * 3 - 2])


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0x80000000], np.uint32)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x7FC0, 0x8000]
    assert reference.cast(bits.view(np.float32), np.dtype(np.uint16)).tolist() == expected


def test_any_flipped_bit_changes_the_digest() -> None:
    theta = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    digest = reference.digest(theta, 5)
    for element in (0, 1, 63):
        for bit in range(32):
            changed = theta.copy()
            changed.view(np.uint32)[element] ^= np.uint32(1 << bit)
            assert reference.digest(changed, 5) != digest


def test_the_digest_tells_places_and_tensors_apart_and_adds_up_over_stretches() -> None:
    theta = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    digest = reference.digest(theta, 5)
    assert digest != reference.digest(theta, 6)
    assert digest != reference.digest(theta[::-1].copy(), 5)
    parts = [reference.digest(theta[40:], 5, start=40), reference.digest(theta[:40], 5)]
    assert sum(parts) % 2**64 == digest


def test_the_digest_follows_its_definition() -> None:
    theta, ident = np.array([1.5, -2.25], np.float32), tensor_id("w")
    expected = 0
    for i, bits in enumerate(theta.view(np.uint32).tolist()):
        expected += bits * ((2 * i + 1) * 0x9E3779B97F4A7C15 + 2 * ident * 0xC2B2AE3D27D4EB4F)
    assert reference.digest(theta, ident) == expected % 2**64
