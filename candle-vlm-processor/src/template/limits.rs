//! What the engine would take at the price of its stack: it walks expressions, and chains of `elif`, by recursion, and
//! bounds only the depth of brackets and blocks.

use super::generation;

/// Operators in one tag, and `elif` in one template. Python's own limit of recursion is below that.
const MOST: usize = 1000;

/// Words that nest what stands beside them.
const WORDS: [&str; 6] = ["and", "or", "not", "if", "in", "is"];

/// Fails, with line and reason, if a tag is too long a chain.
pub(super) fn check(source: &str) -> Result<(), String> {
    let mut branches = 0;
    for tag in generation::tags(source) {
        let text = &source[tag.clone()];
        let line = || source[..tag.start].matches('\n').count() + 1;
        let count = operators(text);
        if count > MOST {
            return Err(format!("line {}: {count} operators in one tag; at most {MOST} are allowed", line()));
        }
        let is_before_word = |sign: char| sign.is_whitespace() || matches!(sign, '{' | '%' | '-' | '+');
        branches += usize::from(text.trim_start_matches(is_before_word).starts_with("elif"));
        if branches > MOST {
            return Err(format!("line {}: more than {MOST} `elif` in one template", line()));
        }
    }
    Ok(())
}

/// Signs and words outside of quotes that can nest an expression.
fn operators(tag: &str) -> usize {
    let mut count = 0;
    let mut quote = None;
    let mut escaped = false;
    let mut word = String::new();
    for symbol in tag.chars() {
        if let Some(open) = quote {
            match symbol {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                _ if symbol == open => quote = None,
                _ => {}
            }
            continue;
        }
        if symbol.is_alphanumeric() || symbol == '_' {
            word.push(symbol);
            continue;
        }
        count += usize::from(WORDS.contains(&word.as_str()));
        word.clear();
        match symbol {
            '"' | '\'' => quote = Some(symbol),
            '+' | '-' | '*' | '/' | '%' | '~' | '|' | '.' | '[' | '(' | '=' | '<' | '>' => count += 1,
            _ => {}
        }
    }
    count
}
