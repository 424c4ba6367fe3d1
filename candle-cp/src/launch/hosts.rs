//! Slurm's compressed lists: machines (`gpu[03-05,9],cpu1`) and tasks for each of them (`4(x2),3`).

/// The first machine of a list. `None` if this is no such list.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host += &rest[..end];
        let Some(inside) = rest[end..].strip_prefix('[') else { break };
        let (numbers, after) = inside.split_once(']')?;
        // Leading zeros belong to the name.
        let number = numbers.split(['-', ',']).next()?;
        if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host += number;
        rest = after;
    }
    let fits = |c: char| c.is_alphanumeric() || "-_.:".contains(c);
    (!host.is_empty() && host.chars().all(fits)).then_some(host)
}

/// Tasks of machine number `node`. `None` if the list does not say.
pub(super) fn tasks_of(list: &str, node: usize) -> Option<usize> {
    let mut left = node;
    for part in list.trim().split(',') {
        let (tasks, machines) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1usize),
        };
        if left < machines {
            return tasks.trim().parse().ok();
        }
        left -= machines;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_machine_of_a_list() {
        for (list, first) in [
            ("node7", "node7"),
            ("gpu[03-05,9],cpu1", "gpu03"),
            ("a[1-2]b", "a1b"),
            ("a[1-2]b,c", "a1b"),
            ("cpu1,gpu[03-05]", "cpu1"),
            ("rack[2,4]-node[010-011].site", "rack2-node010.site"),
            (" n[9] ", "n9"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for wrong in ["", ",a", "a[1-2", "a[]", "a[x-y]", "a b", "[", "a]"] {
            assert_eq!(first_host(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn tasks_of_each_machine() {
        let of = |list: &str| (0..5).map(|node| tasks_of(list, node)).collect::<Vec<_>>();
        assert_eq!(of("4(x2),3"), [Some(4), Some(4), Some(3), None, None]);
        assert_eq!(of("1"), [Some(1), None, None, None, None]);
        assert_eq!(of("2,1(x3)"), [Some(2), Some(1), Some(1), Some(1), None]);
        for wrong in ["", "x", "4(x", "4(xy)", "(x2)"] {
            assert_eq!(tasks_of(wrong, 0), None, "{wrong}");
        }
    }
}
