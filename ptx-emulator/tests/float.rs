//! Floating-point instructions and conversions against plain Rust and values by hand.

mod common;
use common::{check, evaluate};
use half::{bf16, f16};

const NUMBERS: [f32; 14] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    3.0e-39,
    1.0e-30,
    0.1,
    65519.9,
    1.0e10,
    -3.0e38,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    2.5,
];

fn bits() -> Vec<u64> {
    NUMBERS.iter().map(|x| u64::from(x.to_bits())).collect()
}

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

/// Any NaN as one.
fn b(x: f32) -> u64 {
    if x.is_nan() { 0x7fc0_0000 } else { x.to_bits().into() }
}

/// Compares results of a body, up to the bits of NaN.
fn check_f32(body: &str, expected: impl Fn(f32, f32, f32) -> f32) {
    // Adding zero leaves every number but -0 as it is, so NaN is told by a comparison.
    let body = format!("{body} setp.nan.f32 %p, %f, %f; @%p mov.f32 %f, 0f7FC00000;");
    check(&body, "f", &bits(), |x, y, z| b(expected(f(x), f(y), f(z))));
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

#[test]
fn arithmetic_of_f32() {
    check_f32("add.f32 %f, %fa, %fb;", |x, y, _| x + y);
    check_f32("sub.rn.f32 %f, %fa, %fb;", |x, y, _| x - y);
    check_f32("mul.f32 %f, %fa, %fb;", |x, y, _| x * y);
    check_f32("add.ftz.f32 %f, %fa, %fb;", |x, y, _| flush(flush(x) + flush(y)));
    check_f32("mul.ftz.f32 %f, %fa, %fb;", |x, y, _| flush(flush(x) * flush(y)));
    check_f32("fma.rn.f32 %f, %fa, %fb, %fc;", f32::mul_add);
    check_f32("div.rn.f32 %f, %fa, %fb;", |x, y, _| x / y);
    check_f32("neg.f32 %f, %fa;", |x, _, _| -x);
    check_f32("abs.f32 %f, %fa;", |x, _, _| x.abs());
    check_f32(
        "add.sat.f32 %f, %fa, %fb;",
        |x, y, _| if (x + y).is_nan() { 0.0 } else { (x + y).clamp(0.0, 1.0) + 0.0 },
    );
    // One rounding, where a product and a sum have two.
    let one = f64::from(f32::EPSILON) + 1.0;
    let x = u64::from((one as f32).to_bits());
    let found = evaluate("fma.rn.f32 %f, %fa, %fb, %fc;", "f", &[[x, x, u64::from((-1f32).to_bits())]]);
    assert_eq!(f(found[0]), (one * one - 1.0) as f32);
}

#[test]
fn sums_and_products_toward_zero() {
    let of = |body: &str, x: f32, y: f32| f(evaluate(body, "f", &[[x.to_bits().into(), y.to_bits().into(), 0]])[0]);
    let below_one = 1.0 - f32::EPSILON / 2.0;
    // The last two are not exact in f64 either.
    let cases = [
        (1.0, f32::EPSILON * 0.75, 1.0),
        (-1.0, -f32::EPSILON * 0.75, -1.0),
        (1.0, f32::EPSILON * 1.5, 1.0 + f32::EPSILON),
        (1.0, -f32::EPSILON / 8.0, below_one),
        (1.0, -1.0e-30, below_one),
        (-1.0, 1.0e-30, -below_one),
        (f32::MAX, f32::MAX, f32::MAX),
        (2.5, -2.5, 0.0),
    ];
    for (x, y, expected) in cases {
        assert_eq!(of("add.rz.f32 %f, %fa, %fb;", x, y), expected, "{x} + {y}");
        assert_eq!(of("sub.rz.f32 %f, %fa, %fb;", x, -y), expected, "{x} + {y}");
    }
    let x = 1.0 + f32::EPSILON;
    assert_eq!(of("mul.rz.f32 %f, %fa, %fb;", x, -(2.0 - f32::EPSILON)), -2.0);
    assert_eq!(of("mul.rz.f32 %f, %fa, %fb;", below_one, below_one), 1.0 - f32::EPSILON);
}

#[test]
fn minima_and_maxima_of_f32() {
    let min = |x: f32, y: f32| match (x.is_nan(), y.is_nan()) {
        (true, _) => y,
        (_, true) => x,
        _ if x == 0.0 && y == 0.0 => f32::from_bits(x.to_bits() | y.to_bits()),
        _ => {
            if x < y {
                x
            } else {
                y
            }
        }
    };
    let nan = |x: f32, y: f32| x.is_nan() || y.is_nan();
    check_f32("min.f32 %f, %fa, %fb;", |x, y, _| min(x, y));
    check_f32("max.f32 %f, %fa, %fb;", |x, y, _| -min(-x, -y));
    check_f32("min.NaN.f32 %f, %fa, %fb;", |x, y, _| if nan(x, y) { f32::NAN } else { min(x, y) });
    check_f32("max.NaN.f32 %f, %fa, %fb;", |x, y, _| if nan(x, y) { f32::NAN } else { -min(-x, -y) });
}

#[test]
fn functions_of_f32() {
    check_f32("rcp.rn.f32 %f, %fa;", |x, _, _| 1.0 / x);
    check_f32("rcp.approx.ftz.f32 %f, %fa;", |x, _, _| flush(1.0 / flush(x)));
    check_f32("sqrt.rn.f32 %f, %fa;", |x, _, _| x.sqrt());
    check_f32("rsqrt.approx.f32 %f, %fa;", |x, _, _| (1.0 / f64::from(x).sqrt()) as f32);
    check_f32("ex2.approx.ftz.f32 %f, %fa;", |x, _, _| flush(flush(x).exp2()));
    check_f32("lg2.approx.ftz.f32 %f, %fa;", |x, _, _| flush(x).log2());
    // By hand: special values of the exponential and the logarithm.
    let of = |body: &str, x: f32| f(evaluate(body, "f", &[[x.to_bits().into(), 0, 0]])[0]);
    assert_eq!(of("ex2.approx.ftz.f32 %f, %fa;", f32::NEG_INFINITY), 0.0);
    assert_eq!(of("ex2.approx.ftz.f32 %f, %fa;", -3.0), 0.125);
    assert_eq!(of("ex2.approx.ftz.f32 %f, %fa;", -140.0), 0.0);
    assert_eq!(of("lg2.approx.f32 %f, %fa;", 0.0), f32::NEG_INFINITY);
    assert_eq!(of("lg2.approx.f32 %f, %fa;", 8.0), 3.0);
}

#[test]
fn comparisons_of_f32() {
    type Case = (&'static str, fn(f32, f32) -> bool);
    let ordered: [Case; 6] = [
        ("eq", |x, y| x == y),
        ("ne", |x, y| x.partial_cmp(&y).is_some_and(|o| o.is_ne())),
        ("lt", |x, y| x < y),
        ("le", |x, y| x <= y),
        ("gt", |x, y| x > y),
        ("ge", |x, y| x >= y),
    ];
    for (name, holds) in ordered {
        check(&format!("setp.{name}.f32 %p, %fa, %fb;"), "p", &bits(), |x, y, _| holds(f(x), f(y)).into());
        check(&format!("setp.{name}u.f32 %p, %fa, %fb;"), "p", &bits(), |x, y, _| {
            (holds(f(x), f(y)) || f(x).is_nan() || f(y).is_nan()).into()
        });
    }
    check("setp.num.f32 %p, %fa, %fb;", "p", &bits(), |x, y, _| (!f(x).is_nan() && !f(y).is_nan()).into());
    check("setp.eq.ftz.f32 %p, %fa, %fb;", "p", &bits(), |x, y, _| (flush(f(x)) == flush(f(y))).into());
    check("testp.finite.f32 %p, %fa;", "p", &bits(), |x, _, _| f(x).is_finite().into());
}

#[test]
fn halves() {
    let both = |x: u64, y: u64, g: fn(f16, f16) -> f16| {
        u64::from(g(f16::from_bits(x as u16), f16::from_bits(y as u16)).to_bits())
    };
    let numbers: Vec<u64> = [0.0f32, -0.0, 1.0, 0.333, -2.75, 1000.0, 6.0e-5]
        .iter()
        .map(|x| u64::from(f16::from_f32(*x).to_bits()))
        .collect();
    check("add.f16 %h, %ha, %hb;", "h", &numbers, |x, y, _| both(x, y, |a, b| f16::from_f32(a.to_f32() + b.to_f32())));
    check("mul.f16 %h, %ha, %hb;", "h", &numbers, |x, y, _| both(x, y, |a, b| f16::from_f32(a.to_f32() * b.to_f32())));
    let pair = |low: f32, high: f32| {
        u64::from(bf16::from_f32(high).to_bits()) << 16 | u64::from(bf16::from_f32(low).to_bits())
    };
    let operands = [[pair(1.5, -2.0), pair(4.0, 0.25), pair(-1.0, 8.0)]];
    assert_eq!(evaluate("fma.rn.bf16x2 %d, %a, %b, %c;", "d", &operands), [pair(5.0, 7.5)]);
    assert_eq!(evaluate("max.bf16x2 %d, %a, %b;", "d", &operands), [pair(4.0, 0.25)]);
    assert_eq!(evaluate("neg.bf16x2 %d, %a;", "d", &operands), [pair(-1.5, 2.0)]);
    assert_eq!(
        evaluate("add.f64 %df, %da, %db;", "df", &[[0.1f64.to_bits(), 0.2f64.to_bits(), 0]]),
        [(0.1f64 + 0.2).to_bits()]
    );
    assert_eq!(
        evaluate("fma.rn.f64 %df, %da, %db, %da;", "df", &[[0.1f64.to_bits(), 0.2f64.to_bits(), 0]]),
        [0.1f64.mul_add(0.2, 0.1).to_bits()]
    );
}

/// Nearest, ties to even, by searching among all of a 16-bit format.
fn nearest(value: f32, decode: fn(u16) -> f64, largest: u16) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = f64::from(value).abs();
    let best = (0..=largest).min_by(|x, y| {
        let distance = |bits: &u16| (decode(*bits) - magnitude).abs();
        distance(x).total_cmp(&distance(y)).then((x & 1).cmp(&(y & 1)))
    });
    best.unwrap() | sign
}

#[test]
fn conversions_to_halves() {
    // With ties in both directions, subnormal results and numbers that become 0.
    let values =
        [1.0f32, 257.0 / 256.0, 259.0 / 256.0, 0.1, -3.3, 2049.0, 2051.0, 5.0e-8, 3.0e-8, 2.9e-8, -6.1e-5, 1.0e-40];
    for value in values {
        let operands = [[value.to_bits().into(), 2.0f32.to_bits().into(), 0]];
        let half = u64::from(nearest(value, |b| f16::from_bits(b).to_f64(), 0x7bff));
        let brain = u64::from(nearest(value, |b| bf16::from_bits(b).to_f64(), 0x7f7f));
        assert_eq!(evaluate("cvt.rn.f16.f32 %h, %fa;", "h", &operands), [half], "{value}");
        assert_eq!(evaluate("cvt.rn.bf16.f32 %h, %fa;", "h", &operands), [brain], "{value}");
        // The first operand is the upper half.
        assert_eq!(evaluate("cvt.rn.f16x2.f32 %d, %fa, %fb;", "d", &operands), [half << 16 | 0x4000], "{value}");
        assert_eq!(evaluate("cvt.rn.bf16x2.f32 %d, %fb, %fa;", "d", &operands), [0x4000 << 16 | brain], "{value}");
        assert_eq!(evaluate("cvt.rz.bf16.f32 %h, %fa;", "h", &operands), [u64::from(value.to_bits() >> 16)], "{value}");
    }
    for bits in [0u64, 1, 0x3c00, 0x8001, 0x7bff, 0xfc00] {
        let operands = [[bits, 0, 0]];
        assert_eq!(
            evaluate("cvt.f32.f16 %f, %ha;", "f", &operands),
            [u64::from(f16::from_bits(bits as u16).to_f32().to_bits())]
        );
        assert_eq!(evaluate("cvt.f32.bf16 %f, %ha;", "f", &operands), [bits << 16]);
    }
    assert_eq!(
        evaluate("cvt.rna.tf32.f32 %d, %fa;", "d", &[[0x3f80_1000, 0, 0], [0x3f80_0fff, 0, 0]]),
        [0x3f80_2000, 0x3f80_0000]
    );
}

#[test]
fn conversions_of_integers() {
    let of = |body: &str, result: &str, x: f32| evaluate(body, result, &[[x.to_bits().into(), 0, 0]])[0] as u32 as i32;
    for x in [0.5f32, 1.5, 2.5, -0.5, -1.5, -2.7, 2.7] {
        assert_eq!(of("cvt.rni.s32.f32 %d, %fa;", "d", x), x.round_ties_even() as i32);
        assert_eq!(of("cvt.rzi.s32.f32 %d, %fa;", "d", x), x as i32);
        assert_eq!(of("cvt.rmi.s32.f32 %d, %fa;", "d", x), x.floor() as i32);
        assert_eq!(of("cvt.rpi.s32.f32 %d, %fa;", "d", x), x.ceil() as i32);
        assert_eq!(of("cvt.rni.f32.f32 %f, %fa;", "f", x), x.round_ties_even().to_bits() as i32);
        assert_eq!(of("cvt.rzi.u32.f32 %d, %fa;", "d", x), (x.max(0.0) as u32) as i32);
    }
    assert_eq!(of("cvt.rzi.s32.f32 %d, %fa;", "d", 3.0e9), i32::MAX);
    assert_eq!(of("cvt.rzi.s32.f32 %d, %fa;", "d", f32::NAN), 0);
    let nan = f64::NAN.to_bits();
    assert_eq!(evaluate("cvt.rzi.s32.f64 %d, %da;", "d", &[[nan, 0, 0]]), [1 << 31]);
    assert_eq!(evaluate("cvt.rzi.u64.f32 %x, %fa;", "x", &[[f32::NAN.to_bits().into(), 0, 0]]), [1 << 63]);
    assert_eq!(of("cvt.sat.f32.f32 %f, %fa;", "f", 1.5), 1f32.to_bits() as i32);
    for value in [0u64, 1, 0x0100_0001, 0x0100_0003, 0x7fff_ffff, 0xffff_ffff, 0x8000_0080_0000_0001, u64::MAX] {
        let operands = [[value, 0, 0]];
        assert_eq!(evaluate("cvt.rn.f32.u32 %f, %a;", "f", &operands)[0] as u32, (value as u32 as f32).to_bits());
        assert_eq!(
            evaluate("cvt.rn.f32.s32 %f, %a;", "f", &operands)[0] as u32,
            (value as u32 as i32 as f32).to_bits()
        );
        assert_eq!(evaluate("cvt.rn.f32.u64 %f, %xa;", "f", &operands)[0] as u32, (value as f32).to_bits());
        assert_eq!(evaluate("cvt.rn.f32.s64 %f, %xa;", "f", &operands)[0] as u32, (value as i64 as f32).to_bits());
        assert_eq!(evaluate("cvt.rn.f64.s64 %df, %xa;", "df", &operands)[0], (value as i64 as f64).to_bits());
    }
    // Toward zero: the 25th bit is cut.
    assert_eq!(evaluate("cvt.rz.f32.u32 %f, %a;", "f", &[[0x0100_0003, 0, 0]]), [u64::from(16777218f32.to_bits())]);
    let pi = std::f64::consts::PI;
    assert_eq!(evaluate("cvt.rn.f32.f64 %f, %da;", "f", &[[pi.to_bits(), 0, 0]]), [u64::from((pi as f32).to_bits())]);
}
