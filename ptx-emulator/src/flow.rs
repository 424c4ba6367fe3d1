//! Where the lanes of a diverged warp meet again: immediate post-dominators of the control-flow graph.

/// A place that no lane reaches: after the end of the kernel.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// Where control goes after an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next {
    /// To the one below.
    Below,
    /// To a target, and to the one below as well if the branch has a predicate.
    Branch { target: u32, guarded: bool },
    /// Out of the kernel, or to the one below if there is a predicate.
    Exit { guarded: bool },
}

/// For each instruction the immediate post-dominator ([`NOWHERE`] for the exit). The last one must not fall through.
pub(crate) fn reconvergence(code: &[Next]) -> Vec<u32> {
    let count = code.len();
    let exit = count;
    let successors = |at: usize| -> [Option<usize>; 2] {
        match code[at] {
            Next::Below => [Some(at + 1), None],
            Next::Branch { target, guarded } => [Some(target as usize), guarded.then_some(at + 1)],
            Next::Exit { guarded } => [Some(exit), guarded.then_some(at + 1)],
        }
    };
    let order = exit_order(count, successors);
    let mut visit: Vec<usize> = (0..count).filter(|at| order[*at] != usize::MAX).collect();
    visit.sort_by_key(|at| order[*at]);
    let mut parent = vec![usize::MAX; count + 1];
    parent[exit] = exit;
    loop {
        let mut changed = false;
        for &at in &visit {
            let known = successors(at).into_iter().flatten().filter(|s| parent[*s] != usize::MAX);
            let new = known.reduce(|a, b| meet(&parent, &order, a, b));
            if let Some(new) = new.filter(|new| parent[at] != *new) {
                parent[at] = new;
                changed = true;
            }
        }
        if !changed {
            return parent[..count].iter().map(|p| if *p >= exit { NOWHERE } else { *p as u32 }).collect();
        }
    }
}

/// Reverse post-order numbers of a search from the exit against the edges; the exit has 0.
fn exit_order(count: usize, successors: impl Fn(usize) -> [Option<usize>; 2]) -> Vec<usize> {
    let mut predecessors = vec![Vec::new(); count + 1];
    for at in 0..count {
        for successor in successors(at).into_iter().flatten() {
            predecessors[successor].push(at);
        }
    }
    let mut order = vec![usize::MAX; count + 1];
    let mut finished = Vec::with_capacity(count + 1);
    let mut seen = vec![false; count + 1];
    let mut stack = vec![(count, 0)];
    seen[count] = true;
    while let Some((at, child)) = stack.pop() {
        match predecessors[at].get(child) {
            Some(&next) => {
                stack.push((at, child + 1));
                if !std::mem::replace(&mut seen[next], true) {
                    stack.push((next, 0));
                }
            }
            None => finished.push(at),
        }
    }
    for (number, at) in finished.iter().rev().enumerate() {
        order[*at] = number;
    }
    order
}

fn meet(parent: &[usize], order: &[usize], mut a: usize, mut b: usize) -> usize {
    while a != b {
        while order[a] > order[b] {
            a = parent[a];
        }
        while order[b] > order[a] {
            b = parent[b];
        }
    }
    a
}
