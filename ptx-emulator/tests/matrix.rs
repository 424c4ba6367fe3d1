//! Fragments of `ldmatrix` and `mma` against a plain matrix product.

mod common;
use common::{launch, module};
use half::{bf16, f16};
use ptx_emulator::{CopyLanding, Memory};

/// Small numbers that every format holds exactly, so the product is exact too.
fn number(at: usize) -> f32 {
    ((at * 7 + at / 3) % 13) as f32 - 6.0
}

/// Where a lane's register of a fragment lies: rows g and g + 8 alternate, then the columns move on.
struct Layout {
    k: usize,
    /// Numbers per register.
    per: usize,
}

impl Layout {
    /// Row and k of a number of the left fragment: from the tables of the PTX ISA for each shape.
    fn left(&self, lane: usize, register: usize, half: usize) -> (usize, usize) {
        let (group, place) = (lane >> 2, lane & 3);
        let row = if register == 0 || register == 2 { group } else { group + 8 };
        let k = place * self.per + half + if register >= 2 { 4 * self.per } else { 0 };
        (row, k)
    }

    fn right(&self, lane: usize, register: usize, half: usize) -> (usize, usize) {
        ((lane & 3) * self.per + half + if register == 1 { 4 * self.per } else { 0 }, lane >> 2)
    }
}

/// Runs one mma with the fragments packed here and compares all of the 16 x 8 results.
fn check(opcode: &str, layout: &Layout, encode: fn(f32) -> u32) {
    let (k, per) = (layout.k, layout.per);
    let (left, right) = (k / 4 / per * 2, k / 4 / per);
    let a = |row: usize, at: usize| number(row * k + at);
    let b = |at: usize, column: usize| number(1000 + at * 8 + column);
    let c = |row: usize, column: usize| number(3000 + row * 8 + column);
    let pack = |value: &dyn Fn(usize) -> f32| {
        let bits = 32 / per as u32;
        (0..per).fold(0u32, |word, half| word | encode(value(half)) << (half as u32 * bits % 32))
    };
    let mut words: Vec<u32> = Vec::new();
    for lane in 0..32 {
        let mut own = Vec::new();
        own.extend((0..left).map(|r| {
            pack(&|half| {
                let (row, at) = layout.left(lane, r, half);
                a(row, at)
            })
        }));
        own.extend((0..right).map(|r| {
            pack(&|half| {
                let (at, column) = layout.right(lane, r, half);
                b(at, column)
            })
        }));
        for r in 0..4 {
            own.push(c(lane / 4 + r / 2 * 8, lane % 4 * 2 + r % 2).to_bits());
        }
        own.resize(16, 0);
        words.extend(own);
    }
    let names =
        |from: usize, count: usize| (from..from + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ");
    let loads: String = (0..left + right + 4).map(|i| format!("ld.global.u32 %r{i}, [%in+{}];\n", i * 4)).collect();
    let body = format!(
        ".reg .b64 %in, %out; .reg .b32 %r<16>, %t; .reg .f32 %f<4>;
        ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %in, %t, 64, %in; mad.wide.u32 %out, %t, 16, %out;
        {loads}
        {opcode} {{%f0, %f1, %f2, %f3}}, {{{}}}, {{{}}}, {{{}}};
        st.global.v4.f32 [%out], {{%f0, %f1, %f2, %f3}};",
        names(0, left), names(left, right), names(left + right, 4),
    );
    let mut memory = Memory::new();
    let input = memory.upload(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>());
    let output = memory.alloc(512);
    launch(
        &module(".param .u64 in, .param .u64 out", &body),
        &mut memory,
        32,
        0,
        &[input, output],
        CopyLanding::AtWait,
    )
    .unwrap();
    let bytes = memory.read(output, 512).unwrap();
    let found: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    for row in 0..16 {
        for column in 0..8 {
            let expected = c(row, column) + (0..k).map(|at| a(row, at) * b(at, column)).sum::<f32>();
            // Registers 0 and 1 of a lane are row lane / 4, the others 8 rows below.
            let lane = row % 8 * 4 + column / 2;
            assert_eq!(found[lane * 4 + row / 8 * 2 + column % 2], expected, "{opcode}: row {row}, column {column}");
        }
    }
}

#[test]
fn products_of_all_shapes() {
    let of_bf16 = |x: f32| u32::from(bf16::from_f32(x).to_bits());
    let of_f16 = |x: f32| u32::from(f16::from_f32(x).to_bits());
    let mma = "mma.sync.aligned";
    check(&format!("{mma}.m16n8k16.row.col.f32.bf16.bf16.f32"), &Layout { k: 16, per: 2 }, of_bf16);
    check(&format!("{mma}.m16n8k16.row.col.f32.f16.f16.f32"), &Layout { k: 16, per: 2 }, of_f16);
    check(&format!("{mma}.m16n8k8.row.col.f32.bf16.bf16.f32"), &Layout { k: 8, per: 2 }, of_bf16);
    check(&format!("{mma}.m16n8k8.row.col.f32.f16.f16.f32"), &Layout { k: 8, per: 2 }, of_f16);
    // The lower 13 bits of tf32 do not take part.
    check(&format!("{mma}.m16n8k8.row.col.f32.tf32.tf32.f32"), &Layout { k: 8, per: 1 }, |x| x.to_bits() | 0x1fff);
    check(&format!("{mma}.m16n8k4.row.col.f32.tf32.tf32.f32"), &Layout { k: 4, per: 1 }, f32::to_bits);
}

/// Lays 8 x 8 matrices of numbered halves with rows of 16 bytes into shared memory, 4 of them one after the other; loads
/// `count`, and returns each lane's registers.
fn ldmatrix(count: usize, trans: &str) -> Vec<Vec<u32>> {
    let names = (0..count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ");
    let stores: String = (0..count).map(|i| format!("st.global.u32 [%out+{}], %r{i};\n", i * 4)).collect();
    let body = format!(
        ".reg .b64 %out; .reg .b32 %r<4>, %t, %a, %b, %i, %n; .reg .pred %p; .shared .align 16 .b8 s[512];
        ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %out, %t, 16, %out; mov.u32 %a, s;
        mad.lo.u32 %b, %t, 4, %a; shl.b32 %n, %t, 1; mov.u32 %i, 0;
        FILL: add.u32 %r0, %n, 1; shl.b32 %r0, %r0, 16; or.b32 %r0, %r0, %n; st.shared.u32 [%b], %r0;
        add.u32 %b, %b, 128; add.u32 %n, %n, 64; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 4; @%p bra FILL;
        mad.lo.u32 %b, %t, 16, %a;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%b];
        {stores}"
    );
    let mut memory = Memory::new();
    let out = memory.upload(&[0; 512]);
    launch(&module(".param .u64 out", &body), &mut memory, 32, 0, &[out], CopyLanding::AtWait).unwrap();
    let bytes = memory.read(out, 512).unwrap();
    let words: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    words.chunks_exact(4).map(|lane| lane[..count].to_vec()).collect()
}

#[test]
fn fragments_of_ldmatrix() {
    for count in [1, 2, 4] {
        let (plain, transposed) = (ldmatrix(count, ""), ldmatrix(count, ".trans"));
        for lane in 0..32 {
            for matrix in 0..count {
                // The half at row r and column c of a matrix has this number.
                let half = |r: usize, c: usize| (matrix * 64 + r * 8 + c) as u32;
                let (group, pair) = (lane / 4, lane % 4 * 2);
                assert_eq!(plain[lane][matrix], half(group, pair) | half(group, pair + 1) << 16);
                assert_eq!(transposed[lane][matrix], half(pair, group) | half(pair + 1, group) << 16);
            }
        }
    }
}

#[test]
fn rows_of_ldmatrix_are_aligned() {
    let body = ".reg .b32 %a, %r; .shared .align 16 .b8 s[1024]; mov.u32 %a, s;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r}, [%a+8];";
    let fault = launch(&module("", body), &mut Memory::new(), 32, 0, &[], CopyLanding::AtWait).unwrap_err().to_string();
    assert!(fault.contains("lane 0") && fault.contains("shared read of 16 bytes at 0x8 is not aligned"), "{fault}");
}
