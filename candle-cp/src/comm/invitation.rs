//! How processes meet that can tell each other where, without an address that all know from the start: those of an MPI job.

use super::rendezvous::{Meeting, Nonce, PAYLOAD_BYTES};
use crate::error::Result;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Bytes of an [`Invitation`].
pub const INVITATION_BYTES: usize = 640;
const MAGIC: [u8; 8] = *b"candleM1";
const MOST_ADDRESSES: usize = 32;
const ADDRESS_BYTES: usize = 17;

/// Where rank 0 listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invitation {
    nonce: Nonce,
    addresses: Vec<SocketAddr>,
}

impl Invitation {
    /// A listener at a free port on all interfaces, and who can be told of it.
    pub fn issue() -> io::Result<(TcpListener, Self)> {
        let found = interface_addresses()?;
        let has = |v4: bool| found.iter().any(|ip| ip.is_ipv4() == v4 && !ip.is_loopback());
        let v4 = has(true) || !has(false);
        let any: IpAddr = if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let listener = TcpListener::bind((any, 0))?;
        let port = listener.local_addr()?.port();
        let fitting = found.into_iter().filter(|ip| ip.is_ipv4() == v4);
        let addresses = fitting.take(MOST_ADDRESSES).map(|ip| SocketAddr::new(ip, port)).collect();
        // Random keys of the standard library's tables: nothing secret, only unlike those of other groups.
        let mut nonce = Nonce::default();
        nonce[..8].copy_from_slice(&RandomState::new().hash_one(port).to_le_bytes());
        nonce[8..].copy_from_slice(&(RandomState::new().hash_one(std::process::id()) | 1).to_le_bytes());
        Ok((listener, Self { nonce, addresses }))
    }

    pub fn encode(&self) -> [u8; INVITATION_BYTES] {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.nonce);
        bytes.extend(self.addresses.first().map_or(0, SocketAddr::port).to_le_bytes());
        bytes.push(self.addresses.len() as u8);
        for address in &self.addresses {
            match address.ip() {
                IpAddr::V4(ip) => {
                    bytes.push(4);
                    bytes.extend(ip.octets());
                    bytes.extend([0; 12]);
                }
                IpAddr::V6(ip) => {
                    bytes.push(6);
                    bytes.extend(ip.octets());
                }
            }
        }
        bytes.resize(INVITATION_BYTES, 0);
        bytes.try_into().expect("resized")
    }

    /// `None` if it is none: rank 0 runs something else.
    pub fn decode(bytes: &[u8; INVITATION_BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_at(MAGIC.len());
        let (nonce, rest) = rest.split_at(size_of::<Nonce>());
        let (&[low, high, count], rest) = rest.split_first_chunk::<3>()?;
        let port = u16::from_le_bytes([low, high]);
        let address = |bytes: &[u8]| {
            let ip: IpAddr = match bytes {
                [4, a, b, c, d, ..] => Ipv4Addr::new(*a, *b, *c, *d).into(),
                [6, octets @ ..] => Ipv6Addr::from(<[u8; 16]>::try_from(octets).ok()?).into(),
                _ => return None,
            };
            Some(SocketAddr::new(ip, port))
        };
        let listed = rest.chunks_exact(ADDRESS_BYTES).take(count.into()).map(address);
        let addresses = listed.collect::<Option<Vec<_>>>()?;
        (magic == MAGIC).then_some(Self { nonce: nonce.try_into().ok()?, addresses })
    }

    /// Meets the other ranks; returns the connections by the rank at the other end, see
    /// [`Meeting::meet_and_stay`]. Rank 0 has the listener.
    pub fn meet(
        &self,
        (rank, size): (usize, usize),
        listener: Option<TcpListener>,
        deadline: Duration,
    ) -> Result<Vec<(usize, TcpStream)>> {
        let names: Vec<String> = self.addresses.iter().map(|address| address.ip().to_string()).collect();
        let port = self.addresses.first().map_or(0, SocketAddr::port);
        let meeting = Meeting { address: names.join(" or "), port, rank, size, deadline };
        match listener {
            Some(listener) => meeting.host_and_stay(listener, &[0; PAYLOAD_BYTES], &self.nonce),
            None => Ok(vec![(0, meeting.join_at(&self.addresses, &self.nonce)?.1)]),
        }
    }
}

/// Addresses of the interfaces that are up, those of the loopback interface last.
fn interface_addresses() -> io::Result<Vec<IpAddr>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the list is written to `list` and freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut found, mut next) = (Vec::new(), list);
    // SAFETY: entries and what they point at live until the list is freed; an address has the size of its family.
    unsafe {
        while let Some(entry) = next.as_ref() {
            next = entry.ifa_next;
            let Some(address) = entry.ifa_addr.as_ref() else { continue };
            if entry.ifa_flags & libc::IFF_UP as libc::c_uint == 0 {
                continue;
            }
            match i32::from(address.sa_family) {
                libc::AF_INET => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    found.push(IpAddr::from(address.sin_addr.s_addr.to_ne_bytes()));
                }
                libc::AF_INET6 => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
                    // Those of one link need the name of an interface of the caller.
                    if !ip.is_unicast_link_local() {
                        found.push(ip.into());
                    }
                }
                _ => {}
            }
        }
        libc::freeifaddrs(list);
    }
    found.sort_by_key(IpAddr::is_loopback);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitations_survive_the_way() {
        let (listener, own) = Invitation::issue().unwrap();
        assert_ne!(own.nonce, Nonce::default());
        assert!(own.addresses.iter().all(|a| a.port() == listener.local_addr().unwrap().port()));
        let many = (0..MOST_ADDRESSES as u8).map(|i| match i % 2 {
            0 => SocketAddr::new(Ipv4Addr::new(10, 0, i, 1).into(), 4097),
            _ => SocketAddr::new(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, i.into()).into(), 4097),
        });
        let full = Invitation { nonce: [7; 16], addresses: many.collect() };
        for invitation in [own, full] {
            assert_eq!(Invitation::decode(&invitation.encode()), Some(invitation));
        }
        assert_eq!(Invitation::decode(&[0; INVITATION_BYTES]), None);
    }

    #[test]
    fn guests_find_the_right_one_of_several_addresses() {
        let (listener, invitation) = Invitation::issue().unwrap();
        let port = listener.local_addr().unwrap().port();
        // A port where nobody listens, one that says something else, another meeting.
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mail = TcpListener::bind("127.0.0.1:0").unwrap();
        let (other, another) = Invitation::issue().unwrap();
        let loopback = |port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        let addresses =
            vec![closed, mail.local_addr().unwrap(), loopback(other.local_addr().unwrap().port()), loopback(port)];
        let nonce = invitation.nonce;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                use std::io::Write;
                for _ in 0..2 {
                    let _ = mail.accept().and_then(|(mut stream, _)| stream.write_all(b"220 mail.example ESMTP"));
                }
            });
            let stranger = scope.spawn(move || another.meet((0, 2), Some(other), Duration::from_secs(2)));
            let guests: Vec<_> = (1..3)
                .map(|rank| {
                    let invitation = Invitation { nonce, addresses: addresses.clone() };
                    scope.spawn(move || invitation.meet((rank, 3), None, Duration::from_secs(30)))
                })
                .collect();
            let hosted = invitation.meet((0, 3), Some(listener), Duration::from_secs(30)).unwrap();
            assert_eq!(hosted.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1, 2]);
            for guest in guests {
                assert_eq!(guest.join().unwrap().unwrap()[0].0, 0);
            }
            let text = stranger.join().unwrap().unwrap_err().to_string();
            assert!(text.contains("missing 1, came none, and 2 that do not speak this protocol"), "{text}");
        });
    }
}
