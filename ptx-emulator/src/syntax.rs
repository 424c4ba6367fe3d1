//! Tokens of a module as variables, functions and statements.

use crate::ast::{Function, Operand, Source, Statement, Variable, Written};
use crate::error::Error;
use crate::token::{Token, tokens};
use crate::types::{Space, Type};

pub(crate) fn parse(text: &str) -> Result<Source, Error> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0, text };
    let mut source = Source::default();
    while let Some(word) = parser.next_word()? {
        match word {
            ".version" | ".target" | ".address_size" | ".pragma" | ".alias" => parser.skip_line(),
            ".visible" | ".weak" | ".extern" | ".common" | ".entry" | ".global" | ".const" | ".shared" | ".func" => {
                parser.at -= 1;
                parser.top_level(&mut source)?;
            }
            ".section" => parser.skip_braces()?,
            _ => return Err(parser.error(format!("{word} is not known at the top level"))),
        }
    }
    Ok(source)
}

struct Parser<'t> {
    tokens: Vec<(Token<'t>, u32)>,
    at: usize,
    text: &'t str,
}

impl<'t> Parser<'t> {
    fn line(&self) -> u32 {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens.get(self.at.saturating_sub(1).min(last)).map_or(1, |t| t.1)
    }

    fn error(&self, message: impl Into<String>) -> Error {
        Error::syntax(self.text, self.line(), message)
    }

    fn peek(&self) -> Option<Token<'t>> {
        self.tokens.get(self.at).map(|t| t.0)
    }

    fn next(&mut self) -> Result<Token<'t>, Error> {
        let token = self.peek();
        self.at += 1;
        token.ok_or_else(|| self.error("the text ends too early"))
    }

    fn next_word(&mut self) -> Result<Option<&'t str>, Error> {
        match self.peek() {
            None => Ok(None),
            Some(_) => self.word().map(Some),
        }
    }

    fn word(&mut self) -> Result<&'t str, Error> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            other => Err(self.error(format!("a name was expected, not {other:?}"))),
        }
    }

    fn accept(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(Token::Mark(mark));
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, mark: char) -> Result<(), Error> {
        match self.next()? {
            Token::Mark(m) if m == mark => Ok(()),
            other => Err(self.error(format!("`{mark}` was expected, not {other:?}"))),
        }
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.tokens.get(self.at).is_some_and(|t| t.1 == line) {
            self.at += 1;
        }
    }

    fn skip_braces(&mut self) -> Result<(), Error> {
        while !self.accept('{') {
            self.next()?;
        }
        while !self.accept('}') {
            self.next()?;
        }
        Ok(())
    }

    fn count(&mut self) -> Result<u32, Error> {
        match self.number()? {
            Operand::Integer(value) if value <= u64::from(u32::MAX) => Ok(value as u32),
            other => Err(self.error(format!("a count was expected, not {other:?}"))),
        }
    }

    fn counts(&mut self) -> Result<[u32; 3], Error> {
        let mut out = [1; 3];
        out[0] = self.count()?;
        for slot in &mut out[1..] {
            if self.accept(',') {
                *slot = self.count()?;
            }
        }
        Ok(out)
    }

    /// A number with an optional sign.
    fn number(&mut self) -> Result<Operand, Error> {
        let mut negative = self.accept('-');
        if !negative && self.accept('+') {
            // As in `[%rd1+-8]`.
            negative = self.accept('-');
        }
        let Token::Number(text) = self.next()? else { return Err(self.error("a number was expected")) };
        let bad = || self.error(format!("`{text}` is no number"));
        if let Some(hex) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
            let bits = u32::from_str_radix(hex, 16).map_err(|_| bad())?;
            return Ok(Operand::Float32(bits ^ (u32::from(negative) << 31)));
        }
        if let Some(hex) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
            let bits = u64::from_str_radix(hex, 16).map_err(|_| bad())?;
            return Ok(Operand::Float64(bits ^ (u64::from(negative) << 63)));
        }
        if text.contains('.') {
            let value: f64 = text.parse().map_err(|_| bad())?;
            return Ok(Operand::Float64(if negative { -value } else { value }.to_bits()));
        }
        let digits = text.trim_end_matches('U');
        let value = if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
            u64::from_str_radix(hex, 16)
        } else if let Some(binary) = digits.strip_prefix("0b").or_else(|| digits.strip_prefix("0B")) {
            u64::from_str_radix(binary, 2)
        } else {
            digits.parse()
        };
        let value = value.map_err(|_| bad())?;
        Ok(Operand::Integer(if negative { value.wrapping_neg() } else { value }))
    }

    fn top_level(&mut self, source: &mut Source) -> Result<(), Error> {
        let mut external = false;
        loop {
            match self.word()? {
                ".visible" | ".weak" | ".common" => {}
                ".extern" => external = true,
                ".entry" => {
                    let function = self.function()?;
                    source.functions.push(function);
                    return Ok(());
                }
                ".func" => return Err(self.error("device functions (.func) are not modelled: inline them")),
                word => {
                    let Some(space) = Space::named(word) else {
                        return Err(self.error(format!("{word} is not known at the top level")));
                    };
                    if external && space != Space::Shared {
                        return Err(self.error("variables of other modules are not modelled"));
                    }
                    source.variables.extend(self.variables(space)?);
                    return Ok(());
                }
            }
        }
    }

    /// Variables of one declaration, up to the semicolon.
    fn variables(&mut self, space: Space) -> Result<Vec<Variable>, Error> {
        let mut out = Vec::new();
        let (mut align, ty) = self.variable_type()?;
        loop {
            let variable = self.variable(space, &mut align, ty)?;
            out.push(variable);
            if !self.accept(',') {
                self.expect(';')?;
                return Ok(out);
            }
        }
    }

    /// `.align 8 .v2 .f32`: the alignment in bytes, the type and the vector's length.
    fn variable_type(&mut self) -> Result<(u64, (Type, u64)), Error> {
        let (mut align, mut vector) = (None, 1);
        loop {
            match self.word()? {
                ".align" => align = Some(u64::from(self.count()?)),
                ".v2" => vector = 2,
                ".v4" => vector = 4,
                // Attributes of pointers among the parameters: `.ptr .global .align 16`.
                ".ptr" | ".global" | ".shared" | ".const" | ".local" => {}
                word => {
                    let ty = word.strip_prefix('.').and_then(Type::named);
                    let ty = ty.ok_or_else(|| self.error(format!("{word} is no type")))?;
                    return Ok((align.unwrap_or(ty.bytes() * vector), (ty, vector)));
                }
            }
        }
    }

    fn variable(&mut self, space: Space, align: &mut u64, (ty, vector): (Type, u64)) -> Result<Variable, Error> {
        // Parameters that are pointers say what they point to after the type.
        while let Some(Token::Word(".ptr" | ".global" | ".shared" | ".const" | ".local" | ".align")) = self.peek() {
            if self.word()? == ".align" {
                self.count()?;
            }
        }
        let name = self.word()?.to_string();
        let mut count = 1;
        let mut open = false;
        while self.accept('[') {
            if self.accept(']') {
                open = true;
            } else {
                count *= u64::from(self.count()?);
                self.expect(']')?;
            }
        }
        let mut initial = Vec::new();
        if self.accept('=') {
            self.initial(ty, &mut initial)?;
        }
        let element = ty.bytes() * vector;
        let size = if open { initial.len() as u64 } else { element * count };
        if initial.len() as u64 > size || !align.is_power_of_two() {
            return Err(self.error(format!("the size or alignment of {name} cannot be used")));
        }
        Ok(Variable { space, name, align: *align, size, initial })
    }

    fn initial(&mut self, ty: Type, out: &mut Vec<u8>) -> Result<(), Error> {
        if self.accept('{') {
            loop {
                self.initial(ty, out)?;
                if !self.accept(',') {
                    return self.expect('}');
                }
            }
        }
        if let Some(Token::Word(name)) = self.peek() {
            return Err(self.error(format!("an initial value that is the address of {name} is not modelled")));
        }
        let bits = match (self.number()?, ty) {
            (Operand::Float64(bits), Type::F32) => u64::from((f64::from_bits(bits) as f32).to_bits()),
            (Operand::Float32(bits), _) => u64::from(bits),
            (Operand::Integer(bits) | Operand::Float64(bits), _) => bits,
            (other, _) => return Err(self.error(format!("{other:?} is no initial value"))),
        };
        out.extend(&bits.to_le_bytes()[..ty.bytes() as usize]);
        Ok(())
    }

    fn function(&mut self) -> Result<Function, Error> {
        let name = self.word()?.to_string();
        let mut function = Function { name, params: vec![], body: vec![], max_block: None, required_block: None };
        if self.accept('(') && !self.accept(')') {
            loop {
                match self.word()? {
                    ".param" => {}
                    word => return Err(self.error(format!("a parameter was expected, not {word}"))),
                }
                let (mut align, ty) = self.variable_type()?;
                function.params.push(self.variable(Space::Param, &mut align, ty)?);
                if !self.accept(',') {
                    self.expect(')')?;
                    break;
                }
            }
        }
        loop {
            if self.accept('{') {
                break;
            }
            match self.word()? {
                ".maxntid" => function.max_block = Some(self.counts()?),
                ".reqntid" => function.required_block = Some(self.counts()?),
                ".minnctapersm" | ".maxnreg" | ".maxnctapersm" => {
                    self.count()?;
                }
                ".noreturn" => {}
                ".pragma" => self.skip_line(),
                word => return Err(self.error(format!("{word} is not known before a body"))),
            }
        }
        self.body(&mut function.body)?;
        Ok(function)
    }

    fn body(&mut self, body: &mut Vec<(Statement, u32)>) -> Result<(), Error> {
        let mut depth = 1;
        while depth > 0 {
            if self.accept('{') {
                depth += 1;
                body.push((Statement::Open, self.line()));
            } else if self.accept('}') {
                depth -= 1;
                if depth > 0 {
                    body.push((Statement::Close, self.line()));
                }
            } else if !self.accept(';') {
                self.statement(body)?;
            }
        }
        Ok(())
    }

    fn statement(&mut self, body: &mut Vec<(Statement, u32)>) -> Result<(), Error> {
        let guard = if self.accept('@') {
            let negated = self.accept('!');
            Some((self.word()?.to_string(), negated))
        } else {
            None
        };
        let word = self.word()?;
        let line = self.line();
        if guard.is_none() && self.accept(':') {
            body.push((Statement::Label(word.to_string()), line));
            return Ok(());
        }
        match word {
            ".reg" => body.push((self.registers()?, line)),
            ".pragma" => {
                while !self.accept(';') {
                    self.next()?;
                }
            }
            ".section" => self.skip_braces()?,
            ".shared" | ".local" | ".const" | ".global" => {
                let Some(space) = Space::named(word) else { return Err(self.error("no space")) };
                body.extend(self.variables(space)?.into_iter().map(|v| (Statement::Variable(v), line)));
            }
            _ if word.starts_with('.') => return Err(self.error(format!("{word} is not known in a body"))),
            _ => {
                let mut operands = Vec::new();
                while !self.accept(';') {
                    if !operands.is_empty() {
                        self.expect(',')?;
                    }
                    operands.push(self.operand()?);
                }
                let written = Written { guard, opcode: word.to_string(), operands, line };
                body.push((Statement::Instruction(written), line));
            }
        }
        Ok(())
    }

    fn registers(&mut self) -> Result<Statement, Error> {
        let word = self.word()?;
        let ty = word.strip_prefix('.').and_then(Type::named);
        let ty = ty.ok_or_else(|| self.error(format!("{word} is no type of registers")))?;
        let mut names = Vec::new();
        loop {
            let name = self.word()?.to_string();
            let count = if self.accept('<') {
                let count = self.count()?;
                self.expect('>')?;
                Some(count)
            } else {
                None
            };
            names.push((name, count));
            if !self.accept(',') {
                self.expect(';')?;
                return Ok(Statement::Registers(ty, names));
            }
        }
    }

    fn operand(&mut self) -> Result<Operand, Error> {
        if self.accept('!') {
            return Ok(Operand::Not(self.word()?.to_string()));
        }
        if self.accept('{') {
            let mut parts = Vec::new();
            loop {
                parts.push(self.operand()?);
                if !self.accept(',') {
                    self.expect('}')?;
                    return Ok(Operand::Vector(parts));
                }
            }
        }
        if self.accept('[') {
            let (base, offset) = match self.operand()? {
                Operand::Name(name, offset) => (Operand::Name(name, 0), offset),
                other => (other, 0),
            };
            self.expect(']')?;
            return Ok(Operand::Address(Box::new(base), offset));
        }
        let Some(Token::Word(word)) = self.peek() else { return self.number() };
        self.at += 1;
        if self.accept('|') {
            return Ok(Operand::Pair(word.to_string(), self.word()?.to_string()));
        }
        let signed = matches!(self.peek(), Some(Token::Mark('+' | '-')));
        let offset = match if signed { self.number()? } else { Operand::Integer(0) } {
            Operand::Integer(value) => value as i64,
            other => return Err(self.error(format!("{other:?} is no offset"))),
        };
        Ok(Operand::Name(word.to_string(), offset))
    }
}
