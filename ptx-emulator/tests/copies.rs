//! `cp.async`: groups, waits, both moments of landing, and what goes wrong with them.

mod common;
use common::{fault_of, run_shared};
use ptx_emulator::CopyLanding;

fn ok(body: &str, threads: u32) -> Vec<u32> {
    let results = [CopyLanding::AtWait, CopyLanding::AtIssue]
        .map(|copies| run_shared(body, threads, copies).unwrap_or_else(|fault| panic!("{fault}")));
    assert_eq!(results[0], results[1]);
    results.into_iter().next().unwrap()
}

/// Each thread copies 4 words to its place; after `WAIT` it stores the first word of thread `t ^ 32`.
const COPY: &str = "
    mov.u32 %a, s; mad.lo.u32 %b, %t, 16, %a; mad.wide.u32 %x, %t, 16, %data;
    cp.async.cg.shared.global [%b], [%x], 16;
    cp.async.commit_group;
    WAIT
    xor.b32 %c, %t, OTHER; mad.lo.u32 %b, %c, 16, %a; ld.shared.u32 %d, [%b+4];
    mad.wide.u32 %out, %t, 4, %out; st.global.u32 [%out], %d;";

fn copy(wait: &str, other: u32) -> String {
    COPY.replace("WAIT", wait).replace("OTHER", &other.to_string())
}

#[test]
fn copies_arrive_after_wait_and_barrier() {
    let word = |t: u32| (4 * t + 1) * 3 + 1;
    for wait in ["cp.async.wait_group 0; bar.sync 0;", "cp.async.wait_all; bar.sync 0;"] {
        assert_eq!(ok(&copy(wait, 32), 64)[..64], (0..64).map(|t| word(t ^ 32)).collect::<Vec<_>>());
    }
    // A warp's own copies need no barrier.
    assert_eq!(ok(&copy("cp.async.wait_group 0;", 1), 64)[..64], (0..64).map(|t| word(t ^ 1)).collect::<Vec<_>>());
}

#[test]
fn a_missing_wait_or_barrier_is_a_race() {
    let no_wait = fault_of(&copy("bar.sync 0;", 32), 64);
    assert_eq!(no_wait.matches("reads while the cp.async of line").count(), 2, "{no_wait}");
    let own = fault_of(&copy("", 0), 32);
    assert!(own.contains("wait for the copy's group first"), "{own}");
    let too_few = fault_of(&copy("cp.async.wait_group 1; bar.sync 0;", 32), 64);
    assert!(too_few.contains("while the cp.async of line"), "{too_few}");
    // The wait only after the barrier: no other warp knows of it.
    let late = fault_of(&copy("bar.sync 0; cp.async.wait_group 0;", 32), 64);
    assert!(late.contains("race on shared byte") || late.contains("while the cp.async"), "{late}");
    let no_commit = fault_of(&copy("cp.async.wait_group 0; bar.sync 0;", 32).replace("cp.async.commit_group;", ""), 64);
    assert!(no_commit.contains("while the cp.async of line"), "{no_commit}");
}

#[test]
fn waits_leave_younger_groups_under_way() {
    let body = "
        mov.u32 %a, s; mad.lo.u32 %b, %t, 4, %a; mad.wide.u32 %x, %t, 4, %data;
        cp.async.ca.shared.global [%b], [%x], 4; cp.async.commit_group;
        cp.async.ca.shared.global [%b+128], [%x+128], 4; cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.u32 %d, [%b+OFFSET];
        cp.async.wait_group 0;
        ld.shared.u32 %e, [%b+128]; add.u32 %d, %d, %e;
        mad.wide.u32 %out, %t, 4, %out; st.global.u32 [%out], %d;";
    assert_eq!(ok(&body.replace("OFFSET", "0"), 32)[..32], (0..32).map(|t| t * 6 + 98).collect::<Vec<u32>>());
    assert!(fault_of(&body.replace("OFFSET", "128"), 32).contains("while the cp.async of line"));
}

#[test]
fn short_copies_fill_with_zeros() {
    let body = "
        mov.u32 %a, s; mov.u32 %c, SIZE;
        cp.async.cg.shared.global.L2::128B [%a], [%data], 16, %c; cp.async.wait_all;
        ld.shared.v4.u32 {%b, %c, %d, %e}, [%a];
        st.global.v4.u32 [%out], {%b, %c, %d, %e};";
    assert_eq!(ok(&body.replace("SIZE", "6"), 1)[..4], [1, 4, 0, 0]);
    assert_eq!(ok(&body.replace("SIZE", "16"), 1)[..4], [1, 4, 7, 10]);
    // Nothing is read, so the address may be anything aligned.
    let none = body.replace("SIZE", "0").replace("[%data]", "[%data+1048576]");
    assert_eq!(ok(&none, 1)[..4], [0; 4]);
    assert!(fault_of(&body.replace("SIZE", "20"), 1).contains("a copy of 16 bytes that reads 20"));
}

#[test]
fn bounds_and_alignment() {
    let far = fault_of("mov.u32 %a, s; cp.async.cg.shared.global [%a], [%data+4096], 16;", 1);
    assert!(far.contains("global read of 16 bytes") && far.contains("out of bounds"), "{far}");
    let odd = fault_of("mov.u32 %a, s; cp.async.cg.shared.global [%a], [%data+8], 16;", 1);
    assert!(odd.contains("not aligned"), "{odd}");
    let shared = fault_of("mov.u32 %a, s; cp.async.cg.shared.global [%a+4088], [%data], 16;", 1);
    assert!(shared.contains("shared write by cp.async of 16 bytes at 0xff8 is out of bounds"), "{shared}");
    let groups = fault_of("setp.eq.u32 %p, %l, 0; @%p cp.async.commit_group;", 32);
    assert!(groups.contains("is not modelled"), "{groups}");
}

#[test]
fn copies_must_not_overwrite_what_others_read() {
    let body = "
        mov.u32 %a, s; setp.eq.u32 %p, %w, 0; @%p st.shared.u32 [%a], 5; bar.sync 0;
        @%p ld.shared.u32 %d, [%a];
        BARRIER
        @!%p cp.async.ca.shared.global [%a], [%data], 4;
        cp.async.wait_all;";
    let one = body.replace("@!%p cp", "setp.eq.u32 %q, %t, 32; @%q cp");
    ok(&one.replace("BARRIER", "bar.sync 0;"), 64);
    let race = fault_of(&one.replace("BARRIER", ""), 64);
    assert!(race.contains("warp 1 overwrites what warp 0 read"), "{race}");
}
