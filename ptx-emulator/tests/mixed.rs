//! A compiled kernel of ordinary code against the same in Rust.

use ptx_emulator::{CopyLanding, Launch, Memory, Module};

const WEIGHTS: [u32; 4] = [3, 5, 7, 11];
const BYTES: [u8; 3] = [200, 7, 1];
const DIVISOR: u64 = 0x1_2345_6789;
const SHIFT: u32 = 5;

/// The picked number and the steps of one thread.
fn thread(value: u32) -> (u32, u32) {
    let local: Vec<u32> =
        (0..8).map(|i| value.wrapping_mul(WEIGHTS[i % 4]).wrapping_add(BYTES[i % 3].into())).collect();
    let (mut x, mut steps) = (u64::from(value | 1), 0);
    while x != 1 && steps < 60 {
        x = if x % 2 == 1 { 3 * x + 1 } else { x / 2 };
        steps += 1;
    }
    let picked = local[steps as usize % 8];
    let picked = match value % 6 {
        0 => picked.wrapping_add(1),
        1 => picked ^ 0x55,
        2 => picked.wrapping_mul(9),
        3 => picked.rotate_left(SHIFT),
        4 => (((u64::from(picked) << 32) + u64::from(steps)) / DIVISOR) as u32,
        _ => (picked as i32 / 3) as u32,
    };
    (picked, steps)
}

#[test]
fn a_compiled_kernel_does_what_its_source_says() {
    let values: Vec<u32> = (0..128u32).map(|i| i.wrapping_mul(2_654_435_761) >> (i % 24)).collect();
    let module = Module::parse(include_str!("kernels/mixed.ptx")).unwrap();
    let mut memory = Memory::new();
    let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let input = memory.upload(&bytes(&values));
    let (out, total) = (memory.alloc(512), memory.upload(&[0; 4]));
    // The structure has 24 bytes, the last of which is padding.
    let mut params: Vec<u8> = [input, DIVISOR].iter().flat_map(|p| p.to_le_bytes()).collect();
    params.extend(SHIFT.to_le_bytes());
    params.extend(BYTES);
    params.push(0);
    params.extend([out, total].iter().flat_map(|p| p.to_le_bytes()));
    let launch = Launch {
        kernel: "mixed",
        grid: [1; 3],
        block: [128, 1, 1],
        shared_bytes: 0,
        params: &params,
        copies: CopyLanding::AtWait,
    };
    launch.run(&module, &mut memory).unwrap();

    let results: Vec<(u32, u32)> = values.iter().map(|v| thread(*v)).collect();
    let all = results.iter().fold(0u32, |sum, (picked, _)| sum.wrapping_add(*picked));
    let odd = |warp: usize| results[warp * 32..][..32].iter().filter(|(picked, _)| picked % 2 == 1).count() as u32;
    let expected: Vec<u32> = (0..128).map(|t| results[t].0.wrapping_add(odd(t / 32)).wrapping_add(all)).collect();
    assert_eq!(memory.read(out, 512).unwrap(), bytes(&expected));
    assert_eq!(memory.read(total, 4).unwrap(), bytes(&[results.iter().map(|r| r.1).sum()]));
}
