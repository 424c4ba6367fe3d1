//! Instructions as written to instructions that run: names become registers, modifiers become code.

use crate::ast::{Operand, Written};
use crate::operands::Scope;
use crate::registers::{Slot, Word, map1, map2, map3};
use crate::types::{Class, Type};
use crate::warp::Op;
use crate::{access, atomics, collective, convert, copies, float, integer, logic, matrix};

/// An instruction ready to run.
pub(crate) struct Instruction {
    /// A predicate and whether it is negated.
    pub guard: Option<(u32, bool)>,
    pub op: Op,
    pub line: u32,
}

/// The instruction that is being decoded.
pub(crate) struct Decoding<'a> {
    pub scope: &'a mut Scope,
    pub operands: &'a [Operand],
    /// First part of the opcode.
    pub base: &'a str,
    /// Parts of the opcode that name types, in order.
    pub types: Vec<Type>,
    /// The other parts; decoders take out what they know.
    modifiers: Vec<&'a str>,
}

/// What is wrong with an instruction; the caller adds the line.
pub(crate) type Decoded = Result<Op, String>;

/// Decodes an instruction other than a branch.
pub(crate) fn decode(scope: &mut Scope, written: &Written) -> Decoded {
    let mut parts = written.opcode.split('.');
    let base = parts.next().unwrap_or_default();
    let (mut types, mut modifiers) = (vec![], vec![]);
    for part in parts {
        match Type::named(part) {
            Some(ty) => types.push(ty),
            None => modifiers.push(part),
        }
    }
    let mut ins = Decoding { scope, operands: &written.operands, base, types, modifiers };
    let unknown = || format!("unknown opcode {}", written.opcode);
    let op = by_base(&mut ins).unwrap_or_else(|| Err(unknown()))?;
    // A modifier that nobody took may change what the instruction does.
    if ins.modifiers.is_empty() { Ok(op) } else { Err(unknown()) }
}

fn by_base(ins: &mut Decoding<'_>) -> Option<Decoded> {
    let float = ins.types.first().is_some_and(|t| t.float());
    Some(match ins.base {
        "add" | "sub" | "mul" | "div" | "neg" | "abs" | "min" | "max" if float => float::arithmetic(ins),
        "fma" => float::arithmetic(ins),
        "mad" if float => float::arithmetic(ins),
        "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" => float::function(ins),
        "testp" => float::test(ins),
        "add" | "sub" | "mul" | "mad" | "div" | "rem" | "neg" | "abs" | "min" | "max" | "sad" => {
            integer::arithmetic(ins)
        }
        "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "lop3" => logic::decode(ins),
        "bfe" | "bfi" | "bfind" | "brev" | "popc" | "clz" | "prmt" => logic::bits(ins),
        "setp" | "set" | "selp" | "slct" => integer::compare(ins),
        "cvt" => convert::decode(ins),
        "mov" | "cvta" | "isspacep" => access::moves(ins),
        "ld" | "ldu" | "st" | "prefetch" | "prefetchu" => access::decode(ins),
        "atom" | "red" => atomics::decode(ins),
        "cp" => copies::decode(ins),
        "mma" | "ldmatrix" => matrix::decode(ins),
        "shfl" | "vote" | "activemask" | "redux" | "match" => collective::decode(ins),
        "bar" | "barrier" => collective::barrier(ins),
        // The emulator's memory is sequentially consistent, and has no caches that policies could change.
        "membar" | "fence" | "nanosleep" | "createpolicy" => {
            ins.modifiers.clear();
            Ok(Op::Lanes(Box::new(|_, _| {})))
        }
        "ret" | "exit" => {
            ins.take("uni");
            Ok(Op::Exit)
        }
        "trap" | "brkpt" => Ok(Op::Warp(Box::new(|_, _, _| Err(crate::error::Trouble::new("the kernel trapped"))))),
        _ => return None,
    })
}

impl<'a> Decoding<'a> {
    /// Takes a modifier; tells whether it was there.
    pub fn take(&mut self, name: &str) -> bool {
        let at = self.modifiers.iter().position(|m| *m == name);
        at.map(|at| self.modifiers.remove(at)).is_some()
    }

    /// Takes the first modifier that is one of the names.
    pub fn take_any(&mut self, names: &[&str]) -> Option<&'a str> {
        let at = self.modifiers.iter().position(|m| names.contains(m))?;
        Some(self.modifiers.remove(at))
    }

    /// Takes all modifiers that start like this.
    pub fn take_all(&mut self, start: &str) -> bool {
        let before = self.modifiers.len();
        self.modifiers.retain(|m| !m.starts_with(start));
        self.modifiers.len() < before
    }

    /// The type, where there is one.
    pub fn ty(&self) -> Result<Type, String> {
        self.types.first().copied().ok_or_else(|| "the type is missing".to_string())
    }

    pub fn unknown(&self) -> Decoded {
        Err(format!("unknown form of {} for {:?}", self.base, self.types))
    }

    /// Checks the number of operands.
    pub fn count(&self, allowed: std::ops::RangeInclusive<usize>) -> Result<(), String> {
        if allowed.contains(&self.operands.len()) {
            return Ok(());
        }
        Err(format!("{} operands; {} to {} are allowed", self.operands.len(), allowed.start(), allowed.end()))
    }

    pub fn operand(&self, at: usize) -> Result<&'a Operand, String> {
        self.operands.get(at).ok_or_else(|| format!("operand {} is missing", at + 1))
    }

    /// The register that an instruction sets.
    pub fn dst<T: Word>(&mut self, at: usize) -> Result<u32, String> {
        let operand = self.operand(at)?;
        Ok(self.scope.target(operand, Some(T::CLASS))?.index)
    }

    /// A register that is set, of the class that it has.
    pub fn dst_any(&mut self, at: usize) -> Result<Slot, String> {
        let operand = self.operand(at)?;
        self.scope.target(operand, None)
    }

    /// A register that is read; immediates and addresses have registers too.
    pub fn src<T: Word>(&mut self, at: usize) -> Result<u32, String> {
        let operand = self.operand(at)?;
        Ok(self.scope.source(operand, T::CLASS)?.index)
    }

    /// A predicate that is read, and whether it is negated.
    pub fn predicate(&mut self, at: usize) -> Result<(u32, bool), String> {
        match self.operand(at)? {
            Operand::Not(name) => {
                let slot = self.scope.source(&Operand::Name(name.clone(), 0), Class::Predicate)?;
                Ok((slot.index, true))
            }
            other => Ok((self.scope.source(other, Class::Predicate)?.index, false)),
        }
    }

    /// `d = f(a)`
    pub fn unary<D: Word, A: Word>(&mut self, f: impl Fn(A) -> D + Send + Sync + 'static) -> Decoded {
        self.count(2..=2)?;
        Ok(Op::Lanes(map1(self.dst::<D>(0)?, self.src::<A>(1)?, f)))
    }

    /// `d = f(a, b)`
    pub fn binary<D: Word, A: Word, B: Word>(&mut self, f: impl Fn(A, B) -> D + Send + Sync + 'static) -> Decoded {
        self.count(3..=3)?;
        let d = self.dst::<D>(0)?;
        Ok(Op::Lanes(map2(d, [self.src::<A>(1)?, self.src::<B>(2)?], f)))
    }

    /// `d = f(a, b, c)`
    pub fn ternary<D: Word, A: Word, B: Word, C: Word>(
        &mut self,
        f: impl Fn(A, B, C) -> D + Send + Sync + 'static,
    ) -> Decoded {
        self.count(4..=4)?;
        let d = self.dst::<D>(0)?;
        Ok(Op::Lanes(map3(d, [self.src::<A>(1)?, self.src::<B>(2)?, self.src::<C>(3)?], f)))
    }
}
