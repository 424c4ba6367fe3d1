//! The nearest of some names, for messages about a misspelt one.

/// The name that is most like `name`, if at most a third of it differs; the first one of several.
pub(crate) fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let name = name.to_lowercase();
    let (edits, other) = known.iter().map(|&other| (edits(&name, other), other)).min_by_key(|(edits, _)| *edits)?;
    (3 * edits <= other.chars().count()).then_some(other)
}

/// Characters to insert, to leave out, to replace, or to swap with their neighbour, until `a` is `b`.
pub(crate) fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("images", "images", 0),
            ("image", "images", 1),
            ("iamges", "images", 1),
            ("pages", "images", 2),
            ("mesages", "messages", 1),
            ("kitten", "sitting", 3),
            ("ïd", "id", 1),
        ] {
            assert_eq!((edits(a, b), edits(b, a)), (expected, expected), "{a} {b}");
        }
    }

    #[test]
    fn only_a_name_that_is_near_is_nearest() {
        let known = ["messages", "text", "prompt", "completion"];
        for (name, expected) in [
            ("mesages", Some("messages")),
            ("Message", Some("messages")),
            ("compeltion", Some("completion")),
            ("txt", Some("text")),
            ("id", None),
            ("source", None),
            ("", None),
        ] {
            assert_eq!(nearest(name, &known), expected, "{name}");
        }
        assert_eq!(nearest("text", &[]), None);
    }
}
