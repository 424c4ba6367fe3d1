//! Names of a kernel: registers in their scopes, variables, immediates and special registers.

use crate::ast::Operand;
use crate::launch::Launch;
use crate::registers::{LANES, Registers, Slot};
use crate::types::{Class, Space};
use std::collections::BTreeMap;

/// What the names of a kernel mean; gives out registers.
#[derive(Default)]
pub(crate) struct Scope {
    /// Open scopes, by number; the kernel's body is 0.
    pub open: Vec<usize>,
    registers: BTreeMap<(usize, String), Slot>,
    pub labels: BTreeMap<(usize, String), u32>,
    pub variables: BTreeMap<String, (Space, u64)>,
    counts: BTreeMap<Class, u32>,
    constants: BTreeMap<(Class, u64), u32>,
    pub specials: Vec<(Special, u32)>,
    /// The kernel has atomics that may be on global memory.
    pub global_atomics: bool,
    /// Bytes of the narrowest access that may be to shared memory.
    pub narrowest: u32,
}

/// A register with an address, and an offset in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    pub base: Slot,
    pub offset: i64,
}

/// A special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
    Warp,
    Warps,
    /// Lanes below (1), up to (3), at (2), from (6), above (4): a mask.
    LaneMask(u32),
    DynamicShared,
}

impl Special {
    fn named(name: &str) -> Option<Self> {
        if let Some((group, axis)) = name.rsplit_once('.') {
            let axis = ["x", "y", "z"].iter().position(|a| *a == axis)?;
            return Some(match group {
                "%tid" => Self::Thread(axis),
                "%ntid" => Self::Threads(axis),
                "%ctaid" => Self::Block(axis),
                "%nctaid" => Self::Blocks(axis),
                _ => return None,
            });
        }
        Some(match name {
            "%laneid" => Self::Lane,
            "%warpid" => Self::Warp,
            "%nwarpid" => Self::Warps,
            "%lanemask_lt" => Self::LaneMask(1),
            "%lanemask_eq" => Self::LaneMask(2),
            "%lanemask_le" => Self::LaneMask(3),
            "%lanemask_gt" => Self::LaneMask(4),
            "%lanemask_ge" => Self::LaneMask(6),
            "%dynamic_smem_size" => Self::DynamicShared,
            _ => return None,
        })
    }

    /// The value for a thread of a block.
    pub fn value(self, launch: &Launch<'_>, block: [u32; 3], thread: u32) -> u32 {
        let [x, y, _] = launch.block;
        let lane = thread % LANES as u32;
        match self {
            Self::Thread(axis) => [thread % x, thread / x % y, thread / x / y][axis],
            Self::Threads(axis) => launch.block[axis],
            Self::Block(axis) => block[axis],
            Self::Blocks(axis) => launch.grid[axis],
            Self::Lane => lane,
            Self::Warp => thread / LANES as u32,
            Self::Warps => launch.block.iter().product::<u32>().div_ceil(LANES as u32),
            Self::LaneMask(parts) => {
                let eq = 1u32 << lane;
                let masks = [eq - 1, eq, !((eq - 1) | eq)];
                (0..3).filter(|p| parts >> p & 1 != 0).fold(0, |mask, p| mask | masks[p])
            }
            Self::DynamicShared => launch.shared_bytes,
        }
    }
}

impl Scope {
    pub fn new() -> Self {
        Self { narrowest: 16, ..Self::default() }
    }

    pub fn new_register(&mut self, class: Class) -> Slot {
        let count = self.counts.entry(class).or_default();
        *count += 1;
        Slot { class, index: *count - 1 }
    }

    pub fn declare(&mut self, name: String, class: Class) {
        let slot = self.new_register(class);
        let scope = self.open.last().copied().unwrap_or(0);
        self.registers.insert((scope, name), slot);
    }

    pub fn register(&self, name: &str) -> Option<Slot> {
        self.open.iter().rev().find_map(|scope| self.registers.get(&(*scope, name.to_string())).copied())
    }

    pub fn label(&self, name: &str) -> Option<u32> {
        self.open.iter().rev().find_map(|scope| self.labels.get(&(*scope, name.to_string())).copied())
    }

    /// A register that always holds these bits.
    pub fn constant(&mut self, class: Class, bits: u64) -> Slot {
        let bits = if class == Class::Narrow { bits & 0xffff_ffff } else { bits };
        if let Some(index) = self.constants.get(&(class, bits)) {
            return Slot { class, index: *index };
        }
        let slot = self.new_register(class);
        self.constants.insert((class, bits), slot.index);
        slot
    }

    /// A register that is set; `_` is one that nobody reads.
    pub fn target(&mut self, operand: &Operand, class: Option<Class>) -> Result<Slot, String> {
        let Operand::Name(name, 0) = operand else { return Err(format!("{operand:?} is no register to set")) };
        if name == "_" {
            return Ok(self.new_register(class.unwrap_or(Class::Wide)));
        }
        let slot = self.register(name).ok_or_else(|| format!("{name} is no register"))?;
        check(name, slot, class)
    }

    /// A register that is read: a declared one, or that of an immediate, address or special register.
    pub fn source(&mut self, operand: &Operand, class: Class) -> Result<Slot, String> {
        match operand {
            Operand::Integer(bits) => Ok(self.constant(class, *bits)),
            Operand::Float32(bits) if class == Class::Narrow => Ok(self.constant(class, u64::from(*bits))),
            Operand::Float64(bits) if class == Class::Wide => Ok(self.constant(class, *bits)),
            Operand::Name(name, offset) => {
                if let Some(slot) = self.register(name) {
                    return check(name, slot, Some(class));
                }
                if let Some((_, address)) = self.variables.get(name) {
                    let address = address.wrapping_add_signed(*offset);
                    return Ok(self.constant(class, address));
                }
                if name == "WARP_SZ" {
                    return Ok(self.constant(class, LANES as u64));
                }
                let special = Special::named(name).filter(|_| class == Class::Narrow);
                let special = special.ok_or_else(|| format!("{name} is no register, variable or special register"))?;
                if let Some((_, index)) = self.specials.iter().find(|(s, _)| *s == special) {
                    return Ok(Slot { class, index: *index });
                }
                let slot = self.new_register(class);
                self.specials.push((special, slot.index));
                Ok(slot)
            }
            other => Err(format!("{other:?} is no operand of {class:?} class")),
        }
    }

    /// A register that is read, of the class that it has; immediates have `class`.
    pub fn source_any(&mut self, operand: &Operand, class: Class) -> Result<Slot, String> {
        match operand {
            Operand::Name(name, 0) => match self.register(name) {
                Some(slot) => Ok(slot),
                None => self.source(operand, class),
            },
            _ => self.source(operand, class),
        }
    }

    /// What `[base+offset]` stands for.
    pub fn address(&mut self, operand: &Operand) -> Result<Address, String> {
        let Operand::Address(base, offset) = operand else { return Err(format!("{operand:?} is no address")) };
        let slot = self.source_any(base, Class::Wide)?;
        if slot.class == Class::Predicate {
            return Err(format!("{base:?} is no address"));
        }
        Ok(Address { base: slot, offset: *offset })
    }

    /// Registers of a warp before its start, without the special ones.
    pub fn template(&self) -> Registers {
        let count = |class| self.counts.get(&class).copied().unwrap_or(0) as usize;
        let mut registers = Registers {
            narrow: vec![[0; LANES]; count(Class::Narrow)],
            wide: vec![[0; LANES]; count(Class::Wide)],
            predicates: vec![0; count(Class::Predicate)],
        };
        for ((class, bits), index) in &self.constants {
            registers.set_bits(Slot { class: *class, index: *index }, u32::MAX, &[*bits; LANES]);
        }
        registers
    }
}

fn check(name: &str, slot: Slot, class: Option<Class>) -> Result<Slot, String> {
    match class {
        Some(class) if class != slot.class => {
            Err(format!("{name} is a register of {:?} class; {class:?} is needed", slot.class))
        }
        _ => Ok(slot),
    }
}
