//! A module as written.

use crate::types::{Space, Type};

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// A register, label or variable, with an offset in bytes for variables: `%r1`, `tile`, `tile+16`.
    Name(String, i64),
    /// `!%p1`
    Not(String),
    /// An integer, as 64 bits.
    Integer(u64),
    /// Bits of `0f…`.
    Float32(u32),
    /// Bits of `0d…`, or of a decimal number.
    Float64(u64),
    /// `[base+offset]`; the base is a name or an integer.
    Address(Box<Operand>, i64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `%r1|%p1`
    Pair(String, String),
}

/// A variable, parameter or array.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub space: Space,
    pub name: String,
    pub align: u64,
    /// In bytes; 0 for `.extern .shared` arrays without a length.
    pub size: u64,
    /// Initial bytes; zeros follow up to the size.
    pub initial: Vec<u8>,
}

/// A statement of a function's body.
#[derive(Clone, Debug)]
pub(crate) enum Statement {
    Instruction(Written),
    Label(String),
    /// Registers of a type: a name, or a prefix with a count.
    Registers(Type, Vec<(String, Option<u32>)>),
    Variable(Variable),
    Open,
    Close,
}

/// An instruction as written.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    /// The predicate and whether it is negated.
    pub guard: Option<(String, bool)>,
    pub opcode: String,
    pub operands: Vec<Operand>,
    pub line: u32,
}

/// An entry function.
#[derive(Debug)]
pub(crate) struct Function {
    pub name: String,
    pub params: Vec<Variable>,
    pub body: Vec<(Statement, u32)>,
    /// The largest block, in threads per dimension, from `.maxntid`.
    pub max_block: Option<[u32; 3]>,
    /// The only block, from `.reqntid`.
    pub required_block: Option<[u32; 3]>,
}

/// A module as written.
#[derive(Debug, Default)]
pub(crate) struct Source {
    pub variables: Vec<Variable>,
    pub functions: Vec<Function>,
}
