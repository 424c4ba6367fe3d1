//! Resizing against Pillow: not one level of difference.

mod support;

use candle_vlm_processor::{Picture, resize_bicubic};
use support::{Tensors, data, noise};

#[test]
fn equals_pillow() {
    let expected = Tensors::open(&data("pillow/resize.safetensors"));
    let names = expected.names();
    assert_eq!(names.len(), 20);
    for name in names {
        let (from, to) = name.split_once(" to ").unwrap();
        let sides = |text: &str| {
            let (w, h) = text.split_once('x').unwrap();
            (w.parse::<usize>().unwrap(), h.parse::<usize>().unwrap())
        };
        let ((w, h), (width, height)) = (sides(from), sides(to));
        let picture = Picture::from_rgb(w, h, noise(w * h * 3, (w * 1000 + h) as u32)).unwrap();
        let resized = resize_bicubic(&picture, width, height);
        assert_eq!((resized.width(), resized.height()), (width, height));
        let levels = support::largest_difference(resized.rgb_hwc(), &expected.u8(&name));
        assert_eq!(levels, 0, "{name}");
    }
}

#[test]
fn the_same_size_keeps_every_sample() {
    let picture = Picture::from_rgb(7, 5, noise(105, 9)).unwrap();
    assert_eq!(resize_bicubic(&picture, 7, 5), picture);
}
