//! `ldmatrix` and `mma`: fragments of small matrices, spread over the lanes of a warp.

use crate::access::{note_width, take_space};
use crate::ast::Operand;
use crate::decode::{Decoded, Decoding};
use crate::registers::{Registers, Word};
use crate::types::{Class, Space, Type};
use crate::warp::Op;

pub(crate) fn decode(ins: &mut Decoding<'_>) -> Decoded {
    if !ins.take("sync") || !ins.take("aligned") {
        return ins.unknown();
    }
    if ins.base == "mma" { mma(ins) } else { ldmatrix(ins) }
}

fn registers(ins: &mut Decoding<'_>, at: usize, count: usize, set: bool) -> Result<Vec<u32>, String> {
    let one = std::slice::from_ref(ins.operand(at)?);
    let parts = match ins.operand(at)? {
        Operand::Vector(parts) => parts.as_slice(),
        _ => one,
    };
    if parts.len() != count {
        return Err(format!("operand {} has {} registers; {count} are needed", at + 1, parts.len()));
    }
    let class = Class::Narrow;
    let slots = parts.iter().map(|p| {
        let slot = if set { ins.scope.target(p, Some(class)) } else { ins.scope.source(p, class) };
        slot.map(|s| s.index)
    });
    slots.collect()
}

fn ldmatrix(ins: &mut Decoding<'_>) -> Decoded {
    let count = match ins.take_any(&["x1", "x2", "x4"]) {
        Some("x1") => 1,
        Some("x2") => 2,
        Some(_) => 4,
        None => return ins.unknown(),
    };
    let transposed = ins.take("trans");
    let space = take_space(ins);
    if !ins.take("m8n8") || ins.types != [Type::B16] || !matches!(space, Space::Shared | Space::Generic) {
        return ins.unknown();
    }
    ins.count(2..=2)?;
    note_width(ins, space, 16);
    let targets = registers(ins, 0, count, true)?;
    let address = ins.scope.address(ins.operand(1)?)?;
    Ok(Op::Warp(Box::new(move |warp, cta, mask| {
        warp.need_all(mask)?;
        cta.counts.ldmatrix += 1;
        let addresses = warp.addresses(address);
        for (matrix, target) in targets.iter().enumerate() {
            // Lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i.
            let mut rows = [[0u32; 4]; 8];
            for (row, words) in rows.iter_mut().enumerate() {
                let lane = matrix * 8 + row;
                *words = crate::access::get(warp, cta, space, addresses[lane], 16, lane)?;
            }
            let element = |row: usize, column: usize| rows[row][column / 2] >> (column % 2 * 16) & 0xffff;
            let fragment = |lane: usize| {
                let (group, pair) = (lane / 4, lane % 4);
                match transposed {
                    false => rows[group][pair],
                    true => element(pair * 2, group) | element(pair * 2 + 1, group) << 16,
                }
            };
            u32::write(&mut warp.registers, *target, mask, std::array::from_fn(fragment));
        }
        Ok(())
    })))
}

/// `d[16][8] = a[16][k] * b[k][8] + c[16][8]`.
///
/// Products are added to `c` one after the other with ascending k, each sum rounded to f32. Tensor cores add several
/// products at once, with a few more bits and by truncation: results differ in the last bits of f32.
fn mma(ins: &mut Decoding<'_>) -> Decoded {
    let Some(shape) = ins.take_any(&["m16n8k16", "m16n8k8", "m16n8k4"]) else { return ins.unknown() };
    if !ins.take("row") || !ins.take("col") {
        return ins.unknown();
    }
    let [Type::F32, a, b, Type::F32] = ins.types[..] else { return ins.unknown() };
    if a != b {
        return ins.unknown();
    }
    ins.count(4..=4)?;
    #[cfg(target_arch = "x86_64")]
    let avx2 = std::arch::is_x86_feature_detected!("avx2");
    macro_rules! shape {
        ($k:literal, $per:literal, $widen:expr) => {{
            let (d, c) = (registers(ins, 0, 4, true)?, registers(ins, 3, 4, false)?);
            let (a, b) = (registers(ins, 1, $k / 4 / $per * 2, false)?, registers(ins, 2, $k / 4 / $per, false)?);
            Ok(Op::Warp(Box::new(move |warp, cta, mask| {
                warp.need_all(mask)?;
                cta.counts.mma += 1;
                let operands = [&d[..], &a, &b, &c];
                #[cfg(target_arch = "x86_64")]
                if avx2 {
                    // SAFETY: the processor has AVX2.
                    unsafe { product_avx2::<$k, $per>(&mut warp.registers, operands, $widen) };
                    return Ok(());
                }
                product::<$k, $per>(&mut warp.registers, operands, $widen);
                Ok(())
            })))
        }};
    }
    let of_bf16 = |bits: u32, half: usize| f32::from_bits(if half == 0 { bits << 16 } else { bits & 0xffff_0000 });
    let of_f16 = |bits: u32, half: usize| widen_f16(bits >> (half * 16));
    // The lower 13 bits do not take part.
    let of_tf32 = |bits: u32, _: usize| f32::from_bits(bits & !0x1fff);
    match (shape, a) {
        ("m16n8k16", Type::Bf16) => shape!(16, 2, of_bf16),
        ("m16n8k16", Type::F16) => shape!(16, 2, of_f16),
        ("m16n8k8", Type::Bf16) => shape!(8, 2, of_bf16),
        ("m16n8k8", Type::F16) => shape!(8, 2, of_f16),
        ("m16n8k8", Type::Tf32) => shape!(8, 1, of_tf32),
        ("m16n8k4", Type::Tf32) => shape!(4, 1, of_tf32),
        _ => ins.unknown(),
    }
}

/// The lower half as f16: its exponent is moved by 112 with a product, which is exact for subnormal numbers as well.
#[inline(always)]
fn widen_f16(bits: u32) -> f32 {
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
}

/// As [`product`]: the same operations in the same order, in wider registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn product_avx2<const K: usize, const PER: usize>(
    registers: &mut Registers,
    operands: [&[u32]; 4],
    widen: impl Fn(u32, usize) -> f32,
) {
    product::<K, PER>(registers, operands, widen);
}

/// `PER` numbers are in one register. A lane with group g = lane / 4 and place t = lane % 4 holds of `a` the rows g
/// (even registers) and g + 8 (odd ones) at k = `PER` t + 4 `PER` (register / 2), of `b` the column g at
/// k = `PER` t + 4 `PER` register, of `c` and `d` the rows g and g + 8 at the columns 2 t and 2 t + 1.
#[inline(always)]
fn product<const K: usize, const PER: usize>(
    registers: &mut Registers,
    [d, a, b, c]: [&[u32]; 4],
    widen: impl Fn(u32, usize) -> f32,
) {
    let mut left = [[0f32; K]; 16];
    for (at, register) in a.iter().enumerate() {
        let bits = &registers.narrow[*register as usize];
        for (lane, bits) in bits.iter().enumerate() {
            let (row, k) = (lane / 4 + at % 2 * 8, lane % 4 * PER + at / 2 * 4 * PER);
            for half in 0..PER {
                left[row][k + half] = widen(*bits, half);
            }
        }
    }
    let mut right = [[0f32; 8]; K];
    for (at, register) in b.iter().enumerate() {
        let bits = &registers.narrow[*register as usize];
        for (lane, bits) in bits.iter().enumerate() {
            let k = lane % 4 * PER + at * 4 * PER;
            for half in 0..PER {
                right[k + half][lane / 4] = widen(*bits, half);
            }
        }
    }
    let place = |at: usize, lane: usize| (lane / 4 + at / 2 * 8, lane % 4 * 2 + at % 2);
    let mut sums = [[0f32; 8]; 16];
    for (at, register) in c.iter().enumerate() {
        for (lane, value) in f32::read(registers, *register).into_iter().enumerate() {
            let (row, column) = place(at, lane);
            sums[row][column] = value;
        }
    }
    for (sum, left) in sums.iter_mut().zip(&left) {
        for (x, right) in left.iter().zip(&right) {
            for (s, y) in sum.iter_mut().zip(right) {
                *s += x * y;
            }
        }
    }
    for (at, register) in d.iter().enumerate() {
        let values = std::array::from_fn(|lane| {
            let (row, column) = place(at, lane);
            sums[row][column]
        });
        f32::write(registers, *register, u32::MAX, values);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (super::widen_f16(bits.into()), half::f16::from_bits(bits).to_f32());
            assert!(found == expected && found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan());
        }
    }
}
