//! How processes meet, with threads in their place, on the loopback interface.

use candle_cp::comm::rendezvous::{Meeting, PAYLOAD_BYTES, Payload};
use candle_cp::{Error, Result};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);

fn payload() -> Payload {
    std::array::from_fn(|i| (i * 7 + 1) as u8)
}

fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn meeting(port: u16, rank: usize, size: usize, deadline: Duration) -> Meeting {
    Meeting { address: "127.0.0.1".into(), port, rank, size, deadline }
}

/// Rank 0 hosts a group of `size` in this thread; the others are threads.
fn hold(size: usize, deadline: Duration, others: &[Meeting], first: TcpListener) -> (Result<()>, Vec<Result<Payload>>) {
    let port = first.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        let guests: Vec<_> = others.iter().map(|guest| scope.spawn(|| guest.join())).collect();
        let hosted = meeting(port, 0, size, deadline).host(first, &payload());
        (hosted, guests.into_iter().map(|guest| guest.join().unwrap()).collect())
    })
}

fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Rendezvous { .. }), "{error:?}");
    error.to_string()
}

/// What a process of this crate's protocol says first.
fn hello(rank: u32, size: u32, version: &str) -> Vec<u8> {
    let mut bytes = b"candleCP".to_vec();
    for number in [1, rank, size] {
        bytes.extend(u32::to_le_bytes(number));
    }
    bytes.extend(version.as_bytes());
    bytes.resize(64, 0);
    bytes
}

#[test]
fn all_ranks_get_what_rank_0_made_once() {
    for size in [1, 2, 3, 8] {
        let (first, port) = listener();
        drop(first);
        let calls = AtomicUsize::new(0);
        let make = || {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(payload())
        };
        let got: Vec<Result<Payload>> = std::thread::scope(|scope| {
            // The last rank first: nobody listens yet when it calls.
            let start = |rank: usize| {
                let thread = scope.spawn(move || meeting(port, rank, size, LONG).meet(make));
                std::thread::sleep(Duration::from_millis(10));
                thread
            };
            let threads: Vec<_> = (0..size).rev().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(got.iter().all(|payload_of| payload_of.as_ref().unwrap() == &payload()), "{got:?}");
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn another_world_size_is_told_to_all() {
    let (first, port) = listener();
    let others = [meeting(port, 1, 3, SHORT), meeting(port, 2, 4, SHORT)];
    let (hosted, guests) = hold(3, LONG, &others, first);
    let host = text(hosted);
    assert!(host.contains("rank 2 was told of 4 ranks and rank 0 of 3") && host.contains(&format!("127.0.0.1:{port}")));
    assert!(host.starts_with("rank 0 of 3"), "{host}");
    let wrong = text(guests.into_iter().nth(1).unwrap());
    assert!(wrong.starts_with("rank 2 of 4") && wrong.contains("told of 4 ranks and rank 0 of 3"), "{wrong}");
}

#[test]
fn ranks_that_wait_are_told_what_went_wrong() {
    let (first, port) = listener();
    let seated = TcpStream::connect(("127.0.0.1", port)).unwrap();
    (&seated).write_all(&hello(1, 3, env!("CARGO_PKG_VERSION"))).unwrap();
    let (hosted, guests) = hold(3, SHORT, &[], first);
    assert!(guests.is_empty());
    let host = text(hosted);
    assert!(host.contains("missing 2, came 1, and 0 that do not speak"), "{host}");
    let mut answer = Vec::new();
    (&seated).read_to_end(&mut answer).unwrap();
    let said = String::from_utf8_lossy(&answer);
    assert!(said.starts_with("candleCP\u{2}") && said.contains("missing 2, came 1"), "{said}");
}

#[test]
fn another_version_is_named() {
    let (first, port) = listener();
    let mut other = TcpStream::connect(("127.0.0.1", port)).unwrap();
    other.write_all(&hello(1, 2, "0.0.7-other")).unwrap();
    let host = text(hold(2, LONG, &[], first).0);
    assert!(host.contains("rank 1 runs version \"0.0.7-other\" and rank 0"), "{host}");
    let mut said = Vec::new();
    other.read_to_end(&mut said).unwrap();
    assert!(String::from_utf8_lossy(&said).contains("0.0.7-other"));
}

#[test]
fn a_rank_that_comes_twice_ends_the_meeting() {
    let (first, port) = listener();
    let guest = meeting(port, 1, 3, LONG);
    let (hosted, guests) = hold(3, LONG, &[guest.clone(), guest], first);
    let host = text(hosted);
    assert!(host.contains("rank 1 came twice, from 127.0.0.1:"), "{host}");
    for guest in guests {
        let said = text(guest);
        assert!(said.starts_with("rank 1 of 3") && said.contains("rank 0 says: rank 1 came twice"), "{said}");
    }
}

#[test]
fn a_rank_that_was_started_anew_gets_its_seat() {
    let (first, port) = listener();
    let mut gone = TcpStream::connect(("127.0.0.1", port)).unwrap();
    gone.write_all(&hello(1, 3, env!("CARGO_PKG_VERSION"))).unwrap();
    drop(gone);
    let (hosted, guests) = std::thread::scope(|scope| {
        let again = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            (meeting(port, 1, 3, LONG), meeting(port, 2, 3, LONG))
        });
        let host = scope.spawn(|| meeting(port, 0, 3, LONG).host(first, &payload()));
        let (one, two) = again.join().unwrap();
        // With rank 2 all seats are taken, one of them by somebody who is gone.
        let two = scope.spawn(move || two.join());
        std::thread::sleep(Duration::from_millis(100));
        let one = one.join();
        (host.join().unwrap(), [one, two.join().unwrap()])
    });
    hosted.unwrap();
    assert!(guests.iter().all(|guest| guest.as_ref().unwrap() == &payload()), "{guests:?}");
}

#[test]
fn a_rank_that_no_group_has_is_refused() {
    for rank in [0, 2, u32::MAX] {
        let (first, port) = listener();
        let mut other = TcpStream::connect(("127.0.0.1", port)).unwrap();
        other.write_all(&hello(rank, 2, env!("CARGO_PKG_VERSION"))).unwrap();
        let host = text(hold(2, LONG, &[], first).0);
        assert!(host.contains(&format!("a caller says it is rank {rank}, but 1..2 are expected")), "{host}");
    }
    let error = meeting(1, 2, 2, SHORT).meet(|| Ok(payload())).unwrap_err().to_string();
    assert!(error.contains("rank is 2, but a group of 2 has the ranks 0..2"), "{error}");
}

#[test]
fn strangers_are_hung_up_on_and_do_no_harm() {
    let (first, port) = listener();
    let call = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    // One speaks another protocol, one hangs up at once, one begins well, one says nothing.
    let mut talks = call(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n");
    drop(call(b""));
    drop(call(&hello(1, 2, "0")[..20]));
    let silent = call(b"");
    let (hosted, guests) = hold(2, LONG, &[meeting(port, 1, 2, LONG)], first);
    hosted.unwrap();
    assert_eq!(guests[0].as_ref().unwrap(), &payload());
    let mut said = Vec::new();
    let _ = talks.read_to_end(&mut said);
    assert!(said.is_empty(), "a stranger got {} of {PAYLOAD_BYTES} bytes", said.len());
    drop(silent);
}

#[test]
fn a_host_that_does_not_come_ends_at_the_deadline() {
    let (first, port) = listener();
    drop(first);
    let start = Instant::now();
    let error = text(meeting(port, 1, 2, SHORT).join());
    assert!(start.elapsed() >= SHORT && start.elapsed() < LONG);
    assert!(error.contains("rank 0 does not answer within 300ms") && error.contains("refused"), "{error}");
}

#[test]
fn something_else_at_the_port_is_recognized() {
    let (first, port) = listener();
    let (taken, guest) = std::thread::scope(|scope| {
        let guest = scope.spawn(|| meeting(port, 1, 2, LONG).join());
        let (mut stream, _) = first.accept().unwrap();
        stream.write_all(b"220 mail.example ESMTP ready\r\n").unwrap();
        let guest = guest.join().unwrap();
        (meeting(port, 0, 2, SHORT).meet(|| Ok(payload())), guest)
    });
    let guest = text(guest);
    assert!(guest.contains("something else listens there; choose another MASTER_PORT"), "{guest}");
    let taken = text(taken);
    assert!(taken.contains("the port is taken") && taken.contains(&port.to_string()), "{taken}");
}

#[test]
fn a_failure_to_make_the_payload_is_handed_on() {
    let error =
        meeting(1, 0, 2, SHORT).meet(|| Err(Error::Candle(candle_core::Error::Msg("no id".into())))).unwrap_err();
    assert_eq!(error.to_string(), "no id");
}

#[test]
fn a_name_without_an_address_is_told() {
    let nowhere = Meeting { address: "no such host".into(), ..meeting(29500, 0, 2, SHORT) };
    assert!(text(nowhere.listen().map(|_| ())).contains("cannot listen there"));
    let guest = Meeting { rank: 1, ..nowhere };
    assert!(text(guest.join()).contains("no such host:29500"));
}
