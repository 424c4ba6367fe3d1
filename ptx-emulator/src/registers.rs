//! A warp's registers, and loops over its lanes.

use crate::types::Class;
use half::{bf16, f16};

/// Lanes of a warp.
pub(crate) const LANES: usize = 32;
/// All lanes.
pub(crate) const FULL: u32 = u32::MAX;

/// Registers of one warp: `[register][lane]`, predicates as one bit per lane.
/// Immediates, addresses of variables and special registers have registers of their own, filled before the start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registers {
    pub narrow: Vec<[u32; LANES]>,
    pub wide: Vec<[u64; LANES]>,
    pub predicates: Vec<u32>,
}

/// A register's place in the file of its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub class: Class,
    pub index: u32,
}

impl Registers {
    /// Any register as 64 bits per lane, zero-extended.
    pub fn bits(&self, slot: Slot) -> [u64; LANES] {
        match slot.class {
            Class::Wide => self.wide[slot.index as usize],
            Class::Narrow => {
                let mut bits = [0; LANES];
                bits.iter_mut().zip(&self.narrow[slot.index as usize]).for_each(|(b, n)| *b = u64::from(*n));
                bits
            }
            Class::Predicate => bool::read(self, slot.index).map(u64::from),
        }
    }

    /// Sets any register from 64 bits per lane; the upper ones are cut.
    pub fn set_bits(&mut self, slot: Slot, mask: u32, values: &[u64; LANES]) {
        match slot.class {
            Class::Wide => u64::write(self, slot.index, mask, *values),
            Class::Narrow => u32::write(self, slot.index, mask, values.map(|v| v as u32)),
            Class::Predicate => bool::write(self, slot.index, mask, values.map(|v| v != 0)),
        }
    }
}

/// A value that a register holds.
pub(crate) trait Word: Copy + Default + Send + Sync + 'static {
    const CLASS: Class;
    fn read(registers: &Registers, index: u32) -> [Self; LANES];
    fn write(registers: &mut Registers, index: u32, mask: u32, values: [Self; LANES]);
}

macro_rules! word {
    ($($type:ty, $file:ident, $class:ident, |$raw:ident| $get:expr, |$value:ident| $put:expr;)*) => {$(
        impl Word for $type {
            const CLASS: Class = Class::$class;

            #[inline(always)]
            fn read(registers: &Registers, index: u32) -> [Self; LANES] {
                // A plain loop: `map` on an array is not always inlined.
                let register = &registers.$file[index as usize];
                let mut values = [Self::default(); LANES];
                for (value, &$raw) in values.iter_mut().zip(register) {
                    *value = $get;
                }
                values
            }

            #[inline(always)]
            fn write(registers: &mut Registers, index: u32, mask: u32, values: [Self; LANES]) {
                let register = &mut registers.$file[index as usize];
                if mask == FULL {
                    for (slot, $value) in register.iter_mut().zip(values) {
                        *slot = $put;
                    }
                } else {
                    for (lane, $value) in values.into_iter().enumerate() {
                        if mask >> lane & 1 != 0 {
                            register[lane] = $put;
                        }
                    }
                }
            }
        }
    )*};
}

word! {
    u32, narrow, Narrow, |r| r, |v| v;
    i32, narrow, Narrow, |r| r as i32, |v| v as u32;
    f32, narrow, Narrow, |r| f32::from_bits(r), |v| v.to_bits();
    u16, narrow, Narrow, |r| r as u16, |v| u32::from(v);
    i16, narrow, Narrow, |r| r as i16, |v| u32::from(v as u16);
    f16, narrow, Narrow, |r| f16::from_bits(r as u16), |v| u32::from(v.to_bits());
    bf16, narrow, Narrow, |r| bf16::from_bits(r as u16), |v| u32::from(v.to_bits());
    u64, wide, Wide, |r| r, |v| v;
    i64, wide, Wide, |r| r as i64, |v| v as u64;
    f64, wide, Wide, |r| f64::from_bits(r), |v| v.to_bits();
}

impl Word for bool {
    const CLASS: Class = Class::Predicate;

    #[inline(always)]
    fn read(registers: &Registers, index: u32) -> [Self; LANES] {
        let bits = registers.predicates[index as usize];
        std::array::from_fn(|lane| bits >> lane & 1 != 0)
    }

    #[inline(always)]
    fn write(registers: &mut Registers, index: u32, mask: u32, values: [Self; LANES]) {
        let bits = values.iter().enumerate().fold(0, |bits, (lane, v)| bits | u32::from(*v) << lane);
        let register = &mut registers.predicates[index as usize];
        *register = *register & !mask | bits & mask;
    }
}

/// Lanes of a mask, ascending.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 != 0)
}

/// An instruction that works lane by lane on registers alone.
pub(crate) type LaneOp = Box<dyn Fn(&mut Registers, u32) + Send + Sync>;

pub(crate) fn map1<D: Word, A: Word>(d: u32, a: u32, f: impl Fn(A) -> D + Send + Sync + 'static) -> LaneOp {
    Box::new(move |registers, mask| {
        let a = A::read(registers, a);
        let mut values = [D::default(); LANES];
        for i in 0..LANES {
            values[i] = f(a[i]);
        }
        D::write(registers, d, mask, values);
    })
}

pub(crate) fn map2<D: Word, A: Word, B: Word>(
    d: u32,
    [a, b]: [u32; 2],
    f: impl Fn(A, B) -> D + Send + Sync + 'static,
) -> LaneOp {
    Box::new(move |registers, mask| {
        let (a, b) = (A::read(registers, a), B::read(registers, b));
        let mut values = [D::default(); LANES];
        for i in 0..LANES {
            values[i] = f(a[i], b[i]);
        }
        D::write(registers, d, mask, values);
    })
}

pub(crate) fn map3<D: Word, A: Word, B: Word, C: Word>(
    d: u32,
    [a, b, c]: [u32; 3],
    f: impl Fn(A, B, C) -> D + Send + Sync + 'static,
) -> LaneOp {
    Box::new(move |registers, mask| {
        let (a, b, c) = (A::read(registers, a), B::read(registers, b), C::read(registers, c));
        let mut values = [D::default(); LANES];
        for i in 0..LANES {
            values[i] = f(a[i], b[i], c[i]);
        }
        D::write(registers, d, mask, values);
    })
}
