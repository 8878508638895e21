"""The U-Net of `mesh_tensorflow.experimental` as it is, in two and three dimensions, cut into blocks of space.

Its flags are set in code. It imports slices that are laid out already, as its input pipeline makes them: the graph
depends on the mesh and the layout, and is built anew for them.
"""

from __future__ import annotations

from typing import Any

from absl.testing import flagsaver

from benchmarks.programs.program import Feature, Inputs, Program, gradients_and_updates
from benchmarks.programs.stand_ins import stand_in
from pase_mtf.compat import mtf, placement_mesh_impl, tf

stand_in("mesh_tensorflow.experimental.data_aug_lib", always=True)  # wants tensorflow.contrib

from mesh_tensorflow.experimental import unet  # noqa: E402

__all__ = ["PRESETS", "build"]

_SMALL = {"ct_resolution": 16, "batch_size_train": 8, "image_nx_block": 4, "image_ny_block": 4, "n_base_filters": 8,
          "network_depth": 2, "mtf_dtype": "float32", "dropout_keep_p": 1.0}

PRESETS: dict[str, dict[str, Any]] = {
    # Full sizes are the defaults of the module's own flags.
    "full_2d": {"sampled_2d_slices": True},
    "full_3d": {"sampled_2d_slices": False},
    "reduced_2d": {"sampled_2d_slices": True, **_SMALL, "ct_resolution": 32},
    "reduced_3d": {"sampled_2d_slices": False, **_SMALL},
}


def build(preset: str = "reduced_2d", mesh_shape: Any = None, layout: Any = None) -> Program:
    """The training step, in the current tf.Graph.

    Args:
      preset: of PRESETS.
      mesh_shape, layout: the slices that are imported are laid out by them; default: whole, on one device.
    """
    flags = unet.FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    with flagsaver.flagsaver(**PRESETS[preset]):
        mesh_shape = mtf.convert_to_shape(mesh_shape or "")
        impl = placement_mesh_impl.PlacementMeshImpl(
            mesh_shape, mtf.convert_to_layout_rules(layout or ""),
            [f"/device:CPU:{number}" for number in range(mesh_shape.size)])
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
        inputs = Inputs()
        image_shape, label_shape = unet.get_input_mtf_shapes("train")
        images = inputs.placeholder("images", Feature(tuple(image_shape.to_integer_list), tf.float32))
        classes = inputs.placeholder(
            "classes", Feature(tuple(label_shape.to_integer_list[:-1]), tf.int32, flags.label_c))
        labels = tf.one_hot(classes, flags.label_c, dtype=tf.float32)
        _, loss, _, means = unet.unet_with_spatial_partition(
            mesh, impl, "train", impl.make_slices(images, image_shape), impl.make_slices(labels, label_shape))
        global_step = tf.train.get_or_create_global_step()
        updates = gradients_and_updates(loss, mtf.optimize.AdafactorOptimizer(learning_rate=1e-2))
    return Program(f"unet_{preset}", graph, mesh, inputs.placeholders, inputs.features, loss, [*updates, *means],
                   global_step)
