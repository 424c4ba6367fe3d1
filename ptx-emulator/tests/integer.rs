//! Integer instructions against plain Rust, for all pairs or triples of telling values.

mod common;
use common::{check, evaluate};

const VALUES: [u64; 12] =
    [0, 1, 2, 5, 31, 32, 33, 0x7fff, 0x8000_8000, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0x8123_4567_89ab_cdef];

fn s(x: u64) -> i32 {
    x as u32 as i32
}

fn u(x: i32) -> u64 {
    u64::from(x as u32)
}

fn w(x: u64) -> u64 {
    u64::from(x as u32)
}

#[test]
fn sums_and_products_of_32_bits() {
    let v = &VALUES;
    check("add.s32 %d, %a, %b;", "d", v, |a, b, _| w(w(a) + w(b)));
    check("sub.u32 %d, %a, %b;", "d", v, |a, b, _| w(w(a).wrapping_sub(w(b))));
    check("add.sat.s32 %d, %a, %b;", "d", v, |a, b, _| u(s(a).saturating_add(s(b))));
    check("mul.lo.s32 %d, %a, %b;", "d", v, |a, b, _| w(w(a).wrapping_mul(w(b))));
    check("mul.hi.u32 %d, %a, %b;", "d", v, |a, b, _| (w(a) * w(b)) >> 32);
    check("mul.hi.s32 %d, %a, %b;", "d", v, |a, b, _| w(((i64::from(s(a)) * i64::from(s(b))) >> 32) as u64));
    check("mul.wide.u32 %x, %a, %b;", "x", v, |a, b, _| w(a) * w(b));
    check("mul.wide.s32 %x, %a, %b;", "x", v, |a, b, _| (i64::from(s(a)) * i64::from(s(b))) as u64);
    check("mul.wide.s16 %d, %ha, %hb;", "d", v, |a, b, _| u(i32::from(a as i16) * i32::from(b as i16)));
    check("mad.lo.s32 %d, %a, %b, %c;", "d", v, |a, b, c| w(w(a).wrapping_mul(w(b)).wrapping_add(c)));
    check("mad.wide.s32 %x, %a, %b, %xc;", "x", v, |a, b, c| {
        (i64::from(s(a)) * i64::from(s(b))).wrapping_add(c as i64) as u64
    });
    check("mad.hi.u32 %d, %a, %b, %c;", "d", v, |a, b, c| w(((w(a) * w(b)) >> 32) + w(c)));
    check("neg.s32 %d, %a;", "d", v, |a, _, _| u(s(a).wrapping_neg()));
    check("abs.s32 %d, %a;", "d", v, |a, _, _| u(s(a).wrapping_abs()));
    check("min.s32 %d, %a, %b;", "d", v, |a, b, _| u(s(a).min(s(b))));
    check("max.u32 %d, %a, %b;", "d", v, |a, b, _| w(a).max(w(b)));
    check("sad.s32 %d, %a, %b, %c;", "d", v, |a, b, c| w(u64::from(s(a).abs_diff(s(b))) + w(c)));
}

#[test]
fn quotients() {
    let v = &VALUES;
    let d = |b: u64, q: u64, none: u64| if b == 0 { none } else { q };
    check("div.u32 %d, %a, %b;", "d", v, |a, b, _| d(w(b), w(a) / w(b).max(1), 0xffff_ffff));
    check("rem.u32 %d, %a, %b;", "d", v, |a, b, _| d(w(b), w(a) % w(b).max(1), 0xffff_ffff));
    check("div.s32 %d, %a, %b;", "d", v, |a, b, _| u(s(a).checked_div(s(b)).unwrap_or(-1)));
    check("div.u64 %x, %xa, %xb;", "x", v, |a, b, _| a.checked_div(b).unwrap_or(u64::MAX));
    check("rem.s64 %x, %xa, %xb;", "x", v, |a, b, _| (a as i64).checked_rem(b as i64).unwrap_or(-1) as u64);
}

#[test]
fn sums_and_products_of_16_and_64_bits() {
    let v = &VALUES;
    check("add.s64 %x, %xa, %xb;", "x", v, |a, b, _| a.wrapping_add(b));
    check("sub.s64 %x, %xa, %xb;", "x", v, |a, b, _| a.wrapping_sub(b));
    check("mul.lo.s64 %x, %xa, %xb;", "x", v, |a, b, _| a.wrapping_mul(b));
    check("mul.hi.u64 %x, %xa, %xb;", "x", v, |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64);
    check("max.s64 %x, %xa, %xb;", "x", v, |a, b, _| (a as i64).max(b as i64) as u64);
    check("add.s16 %h, %ha, %hb;", "h", v, |a, b, _| u64::from((a as u16).wrapping_add(b as u16)));
    check("min.s16 %h, %ha, %hb;", "h", v, |a, b, _| u64::from((a as i16).min(b as i16) as u16));
    check("mul.lo.u16 %h, %ha, %hb;", "h", v, |a, b, _| u64::from((a as u16).wrapping_mul(b as u16)));
}

#[test]
fn logic_and_shifts() {
    let v = &VALUES;
    check("and.b32 %d, %a, %b;", "d", v, |a, b, _| w(a & b));
    check("or.b64 %x, %xa, %xb;", "x", v, |a, b, _| a | b);
    check("xor.b32 %d, %a, %b;", "d", v, |a, b, _| w(a ^ b));
    check("not.b32 %d, %a;", "d", v, |a, _, _| w(!a));
    check("cnot.b32 %d, %a;", "d", v, |a, _, _| u64::from(w(a) == 0));
    check("shl.b32 %d, %a, %b;", "d", v, |a, b, _| w((a as u32).checked_shl(b as u32).unwrap_or(0).into()));
    check("shr.u32 %d, %a, %b;", "d", v, |a, b, _| (a as u32).checked_shr(b as u32).unwrap_or(0).into());
    check("shr.s32 %d, %a, %b;", "d", v, |a, b, _| u(s(a) >> (b as u32).min(31)));
    check("shl.b64 %x, %xa, %b;", "x", v, |a, b, _| a.checked_shl(b as u32).unwrap_or(0));
    check("shr.s64 %x, %xa, %b;", "x", v, |a, b, _| ((a as i64) >> (b as u32).min(63)) as u64);
    check("shr.u64 %x, %xa, %b;", "x", v, |a, b, _| a.checked_shr(b as u32).unwrap_or(0));
    check("shr.u16 %h, %ha, %b;", "h", v, |a, b, _| (a as u16).checked_shr(b as u32).unwrap_or(0).into());
    let join = |a: u64, b: u64| w(b) << 32 | w(a);
    check("shf.l.wrap.b32 %d, %a, %b, %c;", "d", v, |a, b, c| (join(a, b) << (c & 31)) >> 32);
    check("shf.r.wrap.b32 %d, %a, %b, %c;", "d", v, |a, b, c| w(join(a, b) >> (c & 31)));
    check("shf.l.clamp.b32 %d, %a, %b, %c;", "d", v, |a, b, c| (join(a, b) << w(c).min(32)) >> 32);
    check("shf.r.clamp.b32 %d, %a, %b, %c;", "d", v, |a, b, c| w(join(a, b) >> w(c).min(32)));
    // a & b | ~a & c, and the majority.
    check("lop3.b32 %d, %a, %b, %c, 202;", "d", v, |a, b, c| w(a & b | !a & c));
    check("lop3.b32 %d, %a, %b, %c, 0xe8;", "d", v, |a, b, c| w(a & b | a & c | b & c));
}

#[test]
fn bit_fields() {
    let v = &VALUES;
    check("popc.b32 %d, %a;", "d", v, |a, _, _| w(a).count_ones().into());
    check("popc.b64 %d, %xa;", "d", v, |a, _, _| a.count_ones().into());
    check("clz.b32 %d, %a;", "d", v, |a, _, _| (a as u32).leading_zeros().into());
    check("clz.b64 %d, %xa;", "d", v, |a, _, _| a.leading_zeros().into());
    check("brev.b32 %d, %a;", "d", v, |a, _, _| (a as u32).reverse_bits().into());
    check("bfind.u32 %d, %a;", "d", v, |a, _, _| w(u64::from(31u32.wrapping_sub((a as u32).leading_zeros()))));
    // By hand: source, start, length and the result for unsigned and for signed fields.
    let fields: [(u64, u64, u64, u64, u64); 7] = [
        (0xabcd_1234, 4, 8, 0x23, 0x23),
        (0xabcd_1234, 24, 4, 0xb, 0xffff_fffb),
        (0xabcd_1234, 28, 8, 0xa, 0xffff_fffa),
        (0xabcd_1234, 0, 32, 0xabcd_1234, 0xabcd_1234),
        (0xabcd_1234, 40, 4, 0, 0xffff_ffff),
        (0x2bcd_1234, 40, 4, 0, 0),
        (0xabcd_1234, 5, 0, 0, 0),
    ];
    for (value, start, len, unsigned, signed) in fields {
        let operands = [[value, start, len]];
        assert_eq!(evaluate("bfe.u32 %d, %a, %b, %c;", "d", &operands), [unsigned], "{value:#x} {start} {len}");
        assert_eq!(evaluate("bfe.s32 %d, %a, %b, %c;", "d", &operands), [signed], "{value:#x} {start} {len}");
    }
    let insert = |start: u32, len: u32| {
        evaluate(&format!("bfi.b32 %d, %a, %b, {start}, {len};"), "d", &[[0x5a, 0xffff_0000, 0]])[0]
    };
    assert_eq!(
        [insert(4, 8), insert(28, 8), insert(0, 0), insert(32, 4)],
        [0xffff_05a0, 0xafff_0000, 0xffff_0000, 0xffff_0000]
    );
    let permute = |selector: u64| evaluate("prmt.b32 %d, %a, %b, %c;", "d", &[[0x8322_1100, 0x7766_5544, selector]])[0];
    assert_eq!(
        [permute(0x3210), permute(0x7654), permute(0x5410), permute(0xbbb3)],
        [0x8322_1100, 0x7766_5544, 0x5544_1100, 0xffff_ff83]
    );
}

#[test]
fn comparisons_and_selections() {
    let v = &VALUES;
    type Case = (&'static str, fn(u64, u64) -> bool, fn(i32, i32) -> bool);
    let cases: [Case; 6] = [
        ("eq", |a, b| a == b, |a, b| a == b),
        ("ne", |a, b| a != b, |a, b| a != b),
        ("lt", |a, b| a < b, |a, b| a < b),
        ("le", |a, b| a <= b, |a, b| a <= b),
        ("gt", |a, b| a > b, |a, b| a > b),
        ("ge", |a, b| a >= b, |a, b| a >= b),
    ];
    for (name, unsigned, signed) in cases {
        check(&format!("setp.{name}.u64 %p, %xa, %xb;"), "p", v, |a, b, _| unsigned(a, b).into());
        check(&format!("setp.{name}.s32 %p, %a, %b;"), "p", v, |a, b, _| signed(s(a), s(b)).into());
    }
    check("setp.hi.u32 %p, %a, %b;", "p", v, |a, b, _| (w(a) > w(b)).into());
    check("setp.lt.and.u32 %p, %a, %b, !%pa;", "p", v, |a, b, _| (w(a) < w(b) && w(a) == 0).into());
    check("setp.lt.or.u32 %p|%q, %a, %b, %pa;", "p", v, |a, b, _| (w(a) < w(b) || w(a) != 0).into());
    // The second result is the combination of the opposite.
    check("setp.lt.xor.u32 %q|%p, %a, %b, %pa;", "p", v, |a, b, _| ((w(a) >= w(b)) ^ (w(a) != 0)).into());
    check("set.lt.u32.s32 %d, %a, %b;", "d", v, |a, b, _| if s(a) < s(b) { 0xffff_ffff } else { 0 });
    check("set.eq.f32.u32 %f, %a, %b;", "f", v, |a, b, _| if w(a) == w(b) { 0x3f80_0000 } else { 0 });
    check("setp.lt.u32 %q, %a, %b; selp.b64 %x, %xa, %xb, %q;", "x", v, |a, b, _| if w(a) < w(b) { a } else { b });
    check("slct.b32.s32 %d, %a, %b, %c;", "d", v, |a, b, c| w(if s(c) >= 0 { a } else { b }));
    check("setp.lt.u32 %q, %a, %b; and.pred %p, %q, %pa;", "p", v, |a, b, _| (w(a) < w(b) && w(a) != 0).into());
    check("setp.lt.u32 %q, %a, %b; not.pred %p, %q;", "p", v, |a, b, _| (w(a) >= w(b)).into());
    check("setp.lt.u32 %q, %a, %b; xor.pred %p, %q, %pa;", "p", v, |a, b, _| ((w(a) < w(b)) ^ (w(a) != 0)).into());
}

#[test]
fn moves_and_vectors() {
    let v = &VALUES;
    check("mov.b64 {%d, %e}, %xa; mov.b64 %x, {%e, %d};", "x", v, |a, _, _| a.rotate_left(32));
    check("mov.b32 %d, {%hb, %ha};", "d", v, |a, b, _| (a & 0xffff) << 16 | b & 0xffff);
    check("mov.b32 {_, %h}, %a;", "h", v, |a, _, _| w(a) >> 16);
    check(
        "{ .reg .b32 %d1; mov.u32 %d1, %a; { .reg .b32 %a; mov.u32 %a, %b; add.u32 %d, %d1, %a; } }",
        "d",
        v,
        |a, b, _| w(a.wrapping_add(b)),
    );
    check("@%pa mov.u32 %d, %b; @!%pa mov.u32 %d, 7;", "d", v, |a, b, _| if w(a) != 0 { w(b) } else { 7 });
    check("cvt.s64.s32 %x, %a;", "x", v, |a, _, _| i64::from(s(a)) as u64);
    check("cvt.u64.u32 %x, %a;", "x", v, |a, _, _| w(a));
    check("cvt.s32.s8 %d, %a;", "d", v, |a, _, _| u(i32::from(a as i8)));
    check("cvt.u32.u16 %d, %ha;", "d", v, |a, _, _| a & 0xffff);
    check("cvt.s16.s32 %h, %a;", "h", v, |a, _, _| a & 0xffff);
    check("cvt.sat.u8.s32 %d, %a;", "d", v, |a, _, _| s(a).clamp(0, 255) as u64);
    check("cvt.sat.s32.s64 %d, %xa;", "d", v, |a, _, _| u((a as i64).clamp(i32::MIN.into(), i32::MAX.into()) as i32));
}
