//! Faults to plant into the text of a kernel.

/// A line of a kernel's text and what to put in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Edit {
    pub line: usize,
    pub old: String,
    pub new: String,
}

impl Edit {
    fn new(line: usize, old: &str, new: String) -> Self {
        Self { line, old: old.to_string(), new }
    }

    /// `text` with the fault: exactly this line differs.
    pub fn apply(&self, text: &str) -> String {
        let mut lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[self.line], self.old);
        assert_ne!(self.old, self.new);
        lines[self.line] = &self.new;
        let edited = lines.join("\n");
        let differ = |(number, (a, b)): (usize, (&str, &str))| (a != b).then_some(number);
        let changed: Vec<usize> = text.lines().zip(edited.lines()).enumerate().filter_map(differ).collect();
        assert_eq!((changed, edited.lines().count()), (vec![self.line], text.lines().count()));
        edited
    }

    /// A trap in the same place: whether it is ever executed.
    pub fn trap(&self) -> Self {
        Self { new: "trap;".into(), ..self.clone() }
    }
}

/// A kind of fault.
pub struct Kind {
    pub name: &'static str,
    /// All places of a kernel where it can be planted.
    pub sites: fn(&[&str]) -> Vec<Edit>,
    /// What the emulator says about it, one of these; nothing where wrong numbers are as good.
    pub reports: &'static [&'static str],
}

const fn kind(name: &'static str, sites: fn(&[&str]) -> Vec<Edit>) -> Kind {
    Kind { name, sites, reports: &[] }
}

pub const KINDS: [Kind; 12] = [
    Kind {
        reports: &["race on shared byte", "nobody has written yet"],
        ..kind("a dropped barrier", |lines| each(lines, "bar.sync", |_| Some(String::new())))
    },
    Kind {
        reports: &["while the cp.async of line"],
        ..kind("a wait that leaves one group more under way", |lines| each(lines, "cp.async.wait_group", longer))
    },
    kind("the left fragment's registers swapped", |lines| each(lines, "mma.sync", |line| swapped(line, 1))),
    kind("the right fragment's registers swapped", |lines| each(lines, "mma.sync", |line| swapped(line, 2))),
    kind("a copy that lands 16 bytes further", |lines| each(lines, "cp.async.cg", |line| moved(line, 0))),
    kind("a copy from 16 bytes further", |lines| each(lines, "cp.async.cg", |line| moved(line, 1))),
    kind("fragments from 16 bytes further", |lines| each(lines, "ldmatrix", |line| moved(line, 0))),
    kind("a store 16 bytes further in shared memory", |lines| each(lines, "st.shared", |line| moved(line, 0))),
    kind("a load 16 bytes further in shared memory", |lines| each(lines, "ld.shared", |line| moved(line, 0))),
    kind("a global access 16 bytes further", |lines| {
        [each(lines, "ld.global", |line| moved(line, 0)), each(lines, "st.global", |line| moved(line, 0))].concat()
    }),
    kind("no mask for one pair of a thread", unmasked),
    kind("the rescale of sums forgets the old maximum", forgetful),
];

fn each(lines: &[&str], pattern: &str, edit: impl Fn(&str) -> Option<String>) -> Vec<Edit> {
    let sites = lines.iter().enumerate().filter(|(_, line)| line.contains(pattern));
    sites.map(|(number, line)| Edit::new(number, line, edit(line).unwrap_or_else(|| panic!("{line}")))).collect()
}

/// Waits for one group less.
fn longer(line: &str) -> Option<String> {
    let (wait, count) = line.trim_end_matches(';').rsplit_once(' ')?;
    Some(format!("{wait} {};", count.parse::<u32>().ok()? + 1))
}

/// The first two registers of the `group`-th list change places.
fn swapped(line: &str, group: usize) -> Option<String> {
    let open = line.match_indices('{').nth(group)?.0 + 1;
    let close = open + line[open..].find('}')?;
    let mut parts: Vec<&str> = line[open..close].split(',').collect();
    parts.swap(0, 1);
    Some(format!("{}{}{}", &line[..open], parts.join(","), &line[close..]))
}

/// The `number`-th address is 16 bytes further.
fn moved(line: &str, number: usize) -> Option<String> {
    let open = line.match_indices('[').nth(number)?.0 + 1;
    let close = open + line[open..].find(']')?;
    let (base, offset) = line[open..close].split_once('+').unwrap_or((&line[open..close], "0"));
    let offset: i64 = offset.parse().ok()?;
    Some(format!("{}{base}+{}{}", &line[..open], offset + 16, &line[close..]))
}

/// The branch around what is done with a visible pair: it follows on the joined conditions, before which the result of an
/// invisible one is set.
fn unmasked(lines: &[&str]) -> Vec<Edit> {
    let sites = lines.windows(3).enumerate().filter(|(_, window)| {
        let hidden = window[0].contains("0fFF800000") || window[0].contains("mov.pred") && window[0].ends_with("0;");
        hidden && window[1].contains("or.pred") && window[2].contains(" bra ")
    });
    sites.map(|(number, window)| Edit::new(number + 2, window[2], String::new())).collect()
}

/// `exp2(old maximum - base)` becomes `exp2(base - base)`; the base is selected just before.
fn forgetful(lines: &[&str]) -> Vec<Edit> {
    let sites = lines.windows(2).enumerate().filter_map(|(number, window)| {
        let base = window[0].trim().strip_prefix("selp.f32 ")?.split(',').next()?.trim();
        let parts: Vec<&str> = window[1].trim().strip_prefix("sub.f32 ")?.trim_end_matches(';').split(',').collect();
        let [to, _, minus] = parts[..] else { return None };
        let forgetful = format!("sub.f32 {to}, {base}, {base};");
        (minus.trim() == base).then(|| Edit::new(number + 1, window[1], forgetful))
    });
    sites.collect()
}
