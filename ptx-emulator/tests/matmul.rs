//! A real kernel: a tiled product with cp.async in two stages, ldmatrix and mma; and copies of it with one thing wrong.

use half::bf16;
use ptx_emulator::{CopyLanding, Counts, Fault, Launch, Memory, Module};

const PTX: &str = include_str!("kernels/matmul.ptx");
const M: usize = 128;
const N: usize = 64;
const K: usize = 96;

fn values(count: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        bf16::from_f32(((state >> 33) % 2001) as f32 / 1000.0 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_bits().to_le_bytes()).collect()
}

/// The product by the kernel of `text`.
fn product(text: &str, copies: CopyLanding) -> Result<(Vec<f32>, Counts), Fault> {
    let module = Module::parse(text).expect("the kernel is PTX");
    let mut memory = Memory::new();
    let a = memory.upload(&bytes(&values(M * K, 1)));
    let b = memory.upload(&bytes(&values(K * N, 2)));
    let c = memory.alloc(M * N * 4);
    let mut params: Vec<u8> = [a, b, c].iter().flat_map(|p| p.to_le_bytes()).collect();
    params.extend([N as u32, K as u32].iter().flat_map(|p| p.to_le_bytes()));
    let launch = Launch {
        kernel: "matmul",
        grid: [(N / 64) as u32, (M / 64) as u32, 1],
        block: [128, 1, 1],
        shared_bytes: 2 * (64 * 40 + 32 * 72) * 2,
        params: &params,
        copies,
    };
    let counts = launch.run(&module, &mut memory)?;
    let out = memory.read(c, M * N * 4).expect("all of c is written");
    Ok((out.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(), counts))
}

/// The product in f64.
fn expected() -> Vec<f64> {
    let (a, b) = (values(M * K, 1), values(K * N, 2));
    let term = |i: usize, j: usize, k: usize| a[i * K + k].to_f64() * b[k * N + j].to_f64();
    (0..M * N).map(|at| (0..K).map(|k| term(at / N, at % N, k)).sum()).collect()
}

fn error(found: &[f32]) -> f64 {
    found.iter().zip(expected()).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max)
}

const LANDINGS: [CopyLanding; 2] = [CopyLanding::AtWait, CopyLanding::AtIssue];

#[test]
fn the_product_is_right_in_both_modes() {
    for copies in LANDINGS {
        let (found, counts) = product(PTX, copies).unwrap();
        assert!(error(&found) < 1e-4, "{copies:?}: {}", error(&found));
        let tiles = (M / 64) * (N / 64) * (K / 32);
        // 4 warps, each 16 rows: per tile 2 steps of k and 8 columns of fragments.
        assert_eq!(counts.mma, (tiles * 4 * 2 * 8) as u64);
        assert_eq!(counts.ldmatrix, (tiles * 4 * 2 * 9) as u64);
        assert_eq!(counts.global_written, (M * N * 4) as u64);
        assert_eq!(counts.global_read, (tiles * (64 * 32 + 32 * 64) * 2) as u64);
        assert_eq!(counts.shared_written, counts.global_read);
    }
}

/// Replaces the `at`-th place of `old`, which has to exist.
fn planted(old: &str, at: usize, new: &str) -> String {
    let place = PTX.match_indices(old).nth(at).unwrap_or_else(|| panic!("{old} is not in the kernel")).0;
    format!("{}{new}{}", &PTX[..place], &PTX[place + old.len()..])
}

fn fault(text: &str, copies: CopyLanding) -> String {
    product(text, copies).expect_err("the fault has to be found").to_string()
}

#[test]
fn a_dropped_barrier_is_a_race() {
    for copies in LANDINGS {
        // Without the first one, warps read before the others have copied.
        let first = fault(&planted("bar.sync \t0;", 0, ""), copies);
        assert!(first.contains("nobody has written yet") && first.contains("ldmatrix"), "{first}");
        // Without the second one, copies for the next step overwrite what others read.
        let second = fault(&planted("bar.sync \t0;", 1, ""), copies);
        assert!(second.contains("race on shared byte"), "{second}");
    }
}

#[test]
fn a_wrong_wait_count_is_found() {
    for copies in LANDINGS {
        let message = fault(&planted("cp.async.wait_group 1;", 0, "cp.async.wait_group 2;"), copies);
        assert!(message.contains("while the cp.async of line"), "{message}");
    }
}

#[test]
fn a_swapped_fragment_gives_another_result() {
    let mma = PTX.lines().find(|l| l.contains("mma.sync")).expect("an mma");
    // The first two registers of the left fragment change places.
    let open = mma.match_indices('{').nth(1).unwrap().0 + 1;
    let close = open + mma[open..].find('}').unwrap();
    let mut parts: Vec<&str> = mma[open..close].split(',').map(str::trim).collect();
    parts.swap(0, 1);
    let swapped = format!("{}{}{}", &mma[..open], parts.join(", "), &mma[close..]);
    let (found, _) = product(&planted(mma, 0, &swapped), CopyLanding::AtWait).unwrap();
    assert!(error(&found) > 0.1);
}

#[test]
fn a_missing_transposition_gives_another_result() {
    let (found, _) = product(&PTX.replace(".trans", ""), CopyLanding::AtWait).unwrap();
    assert!(error(&found) > 0.1);
}

#[test]
fn an_offset_by_16_bytes_is_found() {
    // Copies into shared memory: the row's padding is read where nobody wrote, or the last row leaves the array.
    let at = PTX.find("cp.async.cg.shared.global [").unwrap() + "cp.async.cg.shared.global [".len();
    let close = at + PTX[at..].find(']').unwrap();
    let moved = format!("{}+16{}", &PTX[..close], &PTX[close..]);
    for copies in LANDINGS {
        let message = fault(&moved, copies);
        assert!(message.contains("nobody has written") || message.contains("race"), "{message}");
    }
    // Loads of fragments: neighbouring numbers, or the padding.
    let at = PTX.find("ldmatrix.sync.aligned.m8n8.x4").unwrap();
    let close = at + PTX[at..].find(']').unwrap();
    let moved = format!("{}+16{}", &PTX[..close], &PTX[close..]);
    match product(&moved, CopyLanding::AtWait) {
        Ok((found, _)) => assert!(error(&found) > 0.1),
        Err(fault) => assert!(fault.message().contains("nobody has written"), "{fault}"),
    }
}

#[test]
fn too_little_shared_memory_is_out_of_bounds() {
    let text = PTX;
    let module = Module::parse(text).unwrap();
    let mut memory = Memory::new();
    let a = memory.upload(&bytes(&values(M * K, 1)));
    let mut params: Vec<u8> = [a, a, a].iter().flat_map(|p| p.to_le_bytes()).collect();
    params.extend([N as u32, K as u32].iter().flat_map(|p| p.to_le_bytes()));
    let launch = Launch {
        kernel: "matmul",
        grid: [1, 1, 1],
        block: [128, 1, 1],
        shared_bytes: 1024,
        params: &params,
        copies: CopyLanding::AtWait,
    };
    let message = launch.run(&module, &mut memory).unwrap_err().to_string();
    assert!(message.contains("out of bounds: the block has 0x400 bytes"), "{message}");
}
