//! The nearest of some names, for messages about a misspelt one.

use strsim::osa_distance;

/// The name that is most like `name`, if at most a third of it differs; the first one of several.
pub(crate) fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let name = name.to_lowercase();
    let with_edits = known.iter().map(|&other| (osa_distance(&name, other), other));
    let (edits, other) = with_edits.min_by_key(|(edits, _)| *edits)?;
    (3 * edits <= other.chars().count()).then_some(other)
}

#[cfg(test)]
mod tests {
    use super::*;

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
