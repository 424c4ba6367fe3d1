//! Modules and their kernels, ready to run.

use crate::ast::{Function, Operand, Statement, Variable, Written};
use crate::decode::{Instruction, decode};
use crate::error::Error;
use crate::flow::{Next, reconvergence};
use crate::launch::Launch;
use crate::operands::{Scope, Special};
use crate::registers::{LANES, Registers};
use crate::syntax::parse;
use crate::types::{Class, MODULE_BASE, Space};
use crate::warp::{Op, Warp};

/// A PTX module.
pub struct Module {
    pub(crate) text: String,
    kernels: Vec<Kernel>,
    /// Initial bytes of the module's variables.
    pub(crate) variables: Vec<u8>,
}

/// An entry function, decoded.
pub(crate) struct Kernel {
    pub name: String,
    pub code: Vec<Instruction>,
    template: Registers,
    specials: Vec<(Special, u32)>,
    shared_static: u64,
    local_len: u64,
    pub params_len: u64,
    /// Log2 of the bytes of the narrowest access to shared memory.
    pub cell_shift: u32,
    pub max_block: Option<[u32; 3]>,
    pub required_block: Option<[u32; 3]>,
    pub global_atomics: bool,
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Module").field("kernels", &self.kernels().collect::<Vec<_>>()).finish_non_exhaustive()
    }
}

impl Module {
    /// Parses and decodes the text of a module.
    ///
    /// # Errors
    /// With the line and its text, if a statement is no PTX or an instruction is not known.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let source = parse(text)?;
        let mut variables = Vec::new();
        let mut addresses = Vec::new();
        for v in source.variables.iter().filter(|v| matches!(v.space, Space::Global | Space::Const)) {
            let offset = (variables.len() as u64).next_multiple_of(v.align);
            variables.resize(offset as usize, 0);
            variables.extend(&v.initial);
            variables.resize((offset + v.size) as usize, 0);
            addresses.push((v.name.clone(), v.space, MODULE_BASE + offset));
        }
        let kernels = source.functions.iter().map(|f| kernel(text, f, &source.variables, &addresses));
        Ok(Self { text: text.to_string(), kernels: kernels.collect::<Result<_, _>>()?, variables })
    }

    /// Names of the entry functions, in the text's order.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|k| k.name.as_str())
    }

    pub(crate) fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name == name)
    }
}

impl Kernel {
    /// Bytes of shared memory with this much dynamic.
    pub fn shared_len(&self, dynamic: u32) -> u64 {
        self.shared_static + u64::from(dynamic)
    }

    /// A warp of a block before its first instruction.
    pub fn warp(&self, launch: &Launch<'_>, block: [u32; 3], index: usize, threads: u32) -> Warp {
        let mut registers = self.template.clone();
        let first = (index * LANES) as u32;
        for (special, slot) in &self.specials {
            registers.narrow[*slot as usize] =
                std::array::from_fn(|lane| special.value(launch, block, first + lane as u32));
        }
        let lanes = u32::MAX >> (32 - (threads - first).min(32));
        Warp::new(registers, self.local_len as usize, index, lanes)
    }
}

/// Lays variables out one after the other; those without a size share what follows.
fn lay_out<'v>(scope: &mut Scope, variables: impl Iterator<Item = &'v Variable>) -> u64 {
    let mut end = 0u64;
    let (sized, open): (Vec<_>, Vec<_>) = variables.partition(|v| v.size > 0);
    for v in sized {
        let offset = end.next_multiple_of(v.align);
        scope.variables.insert(v.name.clone(), (v.space, offset));
        end = offset + v.size;
    }
    if let Some(align) = open.iter().map(|v| v.align).max() {
        end = end.next_multiple_of(align);
    }
    for v in open {
        scope.variables.insert(v.name.clone(), (v.space, end));
    }
    end
}

fn kernel(
    text: &str,
    function: &Function,
    module_variables: &[Variable],
    addresses: &[(String, Space, u64)],
) -> Result<Kernel, Error> {
    let mut scope = Scope::new();
    for (name, space, address) in addresses {
        scope.variables.insert(name.clone(), (*space, *address));
    }
    let params_len = lay_out(&mut scope, function.params.iter());
    let own: Vec<&Variable> =
        function.body.iter().filter_map(|(s, _)| if let Statement::Variable(v) = s { Some(v) } else { None }).collect();
    let used = |v: &&Variable| v.space == Space::Shared && uses(function, &v.name);
    let shared = module_variables.iter().filter(used).chain(own.iter().copied().filter(|v| v.space == Space::Shared));
    let shared_static = lay_out(&mut scope, shared);
    let local_len = lay_out(&mut scope, own.iter().copied().filter(|v| v.space == Space::Local));
    if let Some(v) = own.iter().find(|v| matches!(v.space, Space::Global | Space::Const)) {
        return Err(Error::syntax(text, 0, format!("{} is a global variable inside of a body", v.name)));
    }
    let code = body(text, function, &mut scope)?;
    Ok(Kernel {
        name: function.name.clone(),
        code,
        template: scope.template(),
        specials: std::mem::take(&mut scope.specials),
        shared_static,
        local_len: local_len.next_multiple_of(16),
        params_len,
        cell_shift: scope.narrowest.trailing_zeros(),
        max_block: function.max_block,
        required_block: function.required_block,
        global_atomics: scope.global_atomics,
    })
}

fn uses(function: &Function, name: &str) -> bool {
    fn mentions(operand: &Operand, name: &str) -> bool {
        match operand {
            Operand::Name(n, _) => n == name,
            Operand::Address(base, _) => mentions(base, name),
            Operand::Vector(parts) => parts.iter().any(|p| mentions(p, name)),
            _ => false,
        }
    }
    function.body.iter().any(|(statement, _)| match statement {
        Statement::Instruction(i) => i.operands.iter().any(|o| mentions(o, name)),
        _ => false,
    })
}

/// Numbers the scopes and finds what each label stands before.
fn find_labels(function: &Function, scope: &mut Scope) {
    let (mut pc, mut scopes, mut open) = (0, 0, vec![0]);
    for (statement, _) in &function.body {
        match statement {
            Statement::Open => {
                scopes += 1;
                open.push(scopes);
            }
            Statement::Close => {
                open.pop();
            }
            Statement::Label(name) => {
                let at = open.last().copied().unwrap_or(0);
                scope.labels.insert((at, name.clone()), pc);
            }
            Statement::Instruction(_) => pc += 1,
            Statement::Registers(..) | Statement::Variable(_) => {}
        }
    }
}

fn body(text: &str, function: &Function, scope: &mut Scope) -> Result<Vec<Instruction>, Error> {
    find_labels(function, scope);
    let (mut code, mut next, mut scopes) = (Vec::new(), Vec::new(), 0);
    scope.open = vec![0];
    for (statement, line) in &function.body {
        match statement {
            Statement::Open => {
                scopes += 1;
                scope.open.push(scopes);
            }
            Statement::Close => {
                scope.open.pop();
            }
            Statement::Registers(ty, names) => {
                for (name, count) in names {
                    match count {
                        Some(count) => (0..*count).for_each(|i| scope.declare(format!("{name}{i}"), ty.class())),
                        None => scope.declare(name.clone(), ty.class()),
                    }
                }
            }
            Statement::Label(_) | Statement::Variable(_) => {}
            Statement::Instruction(written) => {
                let (instruction, flow) =
                    instruction(scope, written).map_err(|message| Error::syntax(text, *line, message))?;
                code.push(instruction);
                next.push(flow);
            }
        }
    }
    let line = code.last().map_or(1, |i: &Instruction| i.line);
    code.push(Instruction { guard: None, op: Op::Exit, line });
    next.push(Next::Exit { guarded: false });
    let meets = reconvergence(&next);
    for (instruction, meet) in code.iter_mut().zip(meets) {
        if let Op::Branch { reconverge, .. } = &mut instruction.op {
            *reconverge = meet;
        }
    }
    Ok(code)
}

fn instruction(scope: &mut Scope, written: &Written) -> Result<(Instruction, Next), String> {
    let guard = match &written.guard {
        None => None,
        Some((name, negated)) => {
            let slot = scope.source(&Operand::Name(name.clone(), 0), Class::Predicate)?;
            Some((slot.index, *negated))
        }
    };
    let guarded = guard.is_some();
    let (op, next) = if matches!(written.opcode.as_str(), "bra" | "bra.uni") {
        let [Operand::Name(name, 0)] = written.operands.as_slice() else { return Err("bra needs one label".into()) };
        let target = scope.label(name).ok_or_else(|| format!("{name} is no label"))?;
        // The place where both sides meet is known when all branches are.
        (Op::Branch { target, reconverge: 0 }, Next::Branch { target, guarded })
    } else {
        let op = decode(scope, written)?;
        let next = if matches!(op, Op::Exit) { Next::Exit { guarded } } else { Next::Below };
        (op, next)
    };
    Ok((Instruction { guard, op, line: written.line }, next))
}
